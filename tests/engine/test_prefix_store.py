"""engine/prefix_disk_cache.py: finds what saves most, keeps within its size, and survives damage, kills, full disks and company.

Run as a program, this file is the process that is killed or whose disk is full: see `main`.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.prefix_disk_cache import PrefixStore, StoredPrefix, worth_keeping
from localrag.engine.prefix_file import Identity, PrefixFileError, file_bytes, read, write

IDENTITY = Identity(model="m", llama_build="b", architecture="llama", type_k="f16", type_v="f16", flash_attention=True, n_ctx_train=8192)
OTHER = replace(IDENTITY, model="n")
ROOT = Path(__file__).parents[2]


def state(token_ids, size: int = 1000) -> bytes:
    """The payload that belongs to these tokens, and to no others."""
    return hashlib.shake_128(repr(tuple(token_ids)).encode()).digest(size)


def keep(store: PrefixStore, token_ids, breakpoints=()) -> None:
    assert store.save(token_ids, breakpoints, state(token_ids))


def kept(folder: Path) -> list[tuple[int, ...]]:
    return sorted(read(path, IDENTITY)[0] for path in folder.glob("*.prefix"))


def age(store: PrefixStore, token_ids, seconds: int) -> None:
    """Make a list one that was used so long ago."""
    found = store.longest(token_ids)
    assert found
    when = time.time_ns() - seconds * 10**9
    os.utime(found.path, ns=(when, when))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "prefixes"


@pytest.fixture
def store(folder):
    return PrefixStore(folder, IDENTITY)


def test_a_second_process_reads_what_the_first_one_kept(folder, store):
    keep(store, range(1000))
    second = PrefixStore(folder, IDENTITY)
    found = second.longest([*range(1000), 7, 7, 7])
    assert found is not None
    assert found.num_tokens == 1000
    assert second.load(found) == (tuple(range(1000)), (), state(range(1000)))
    assert second.warning is None


def test_the_longest_whole_prefix(store):
    for token_ids in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [9]):
        keep(store, token_ids)
    wanted = ([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 9], [1], [])
    assert [num_found(store.longest(token_ids)) for token_ids in wanted] == [4, 4, 2, None, None]


def test_borders_are_part_of_what_is_found(store):
    keep(store, [1, 2, 3], (1, 3))
    keep(store, [1, 2, 3, 4], (2, 4))
    assert num_found(store.longest([1, 2, 3, 4, 5], (1, 3, 4))) == 3
    assert num_found(store.longest([1, 2, 3, 4, 5], (2, 4))) == 4
    assert store.longest([1, 2, 3, 4, 5], (3, 4)) is None
    assert store.longest([1, 2, 3, 4, 5], (1, 2, 3)) is None
    assert num_found(store.longest([1, 2, 3, 4, 5], (1, 3), last_only=True)) == 3
    assert store.longest([1, 2, 3, 4, 5], (1, 3, 4), last_only=True) is None
    assert store.load(store.longest([1, 2, 3], (1, 3))) == ((1, 2, 3), (1, 3), state([1, 2, 3]))


def num_found(found: StoredPrefix | None):
    return None if found is None else found.num_tokens


token_lists = st.lists(st.integers(0, 2).map(lambda token: token * 0x01010101), max_size=9)
border_lists = st.sets(st.integers(1, 9), max_size=3).map(sorted)


@settings(deadline=None, max_examples=60)
@given(stored=st.lists(st.tuples(token_lists.filter(bool), border_lists), max_size=8), wanted=token_lists, breakpoints=border_lists)
def test_longest_is_what_a_plain_search_finds(tmp_path_factory, stored, wanted, breakpoints):
    store = PrefixStore(tmp_path_factory.mktemp("search"), IDENTITY)
    choices = []
    for token_ids, ends in stored:
        ends_within = [end for end in ends if end <= len(token_ids)]
        keep(store, token_ids, ends_within)
        if wanted[: len(token_ids)] == token_ids and ends_within == [border for border in breakpoints if border <= len(token_ids)]:
            choices.append(len(token_ids))
    found = store.longest(wanted, breakpoints)
    assert num_found(found) == max(choices, default=None)
    if found:
        assert store.load(found)[0] == tuple(wanted[: found.num_tokens])


def test_other_identities_share_the_folder_and_nothing_else(folder, store):
    other = PrefixStore(folder, OTHER)
    keep(store, [1, 2, 3])
    assert other.longest([1, 2, 3]) is None
    keep(other, [1, 2, 3])
    assert len(list(folder.iterdir())) == 2
    assert store.warning is other.warning is None


def test_names_are_hashes_and_tell_nothing(folder, store):
    keep(store, [1, 2, 3])
    (name,) = [path.name for path in folder.iterdir()]
    tokens = b"\1\0\0\0\2\0\0\0\3\0\0\0"
    assert name == f"{IDENTITY.digest[:16]}-{hashlib.sha256(len(tokens).to_bytes(8, 'little') + tokens).hexdigest()[:32]}.v1.prefix"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_finding_does_not_read_payloads(folder, store):
    write_large = b"x" * (8 << 20)
    assert store.save(range(500), (), write_large)
    tracemalloc.start()
    try:
        assert PrefixStore(folder, IDENTITY).longest(range(600))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_index_follows_the_folder(folder, store):
    keep(store, [1, 2, 3])
    found = store.longest([1, 2, 3])
    other = PrefixStore(folder, IDENTITY)
    keep(other, [1, 2, 3, 4])
    assert num_found(store.longest([1, 2, 3, 4])) == 4
    for path in list(folder.iterdir()):
        path.unlink()
    assert store.longest([1, 2, 3, 4]) is None
    assert store.load(found) is None  # evicted by another process in between: nobody's fault
    assert store.warning is None


# what is kept beside what


def test_the_same_list_is_written_once_and_noted_as_used(folder, store):
    keep(store, [1, 2, 3])
    age(store, [1, 2, 3], 100)
    inode = next(folder.iterdir()).stat().st_ino
    keep(PrefixStore(folder, IDENTITY), [1, 2, 3])
    (path,) = folder.iterdir()
    assert path.stat().st_ino == inode
    assert time.time() - path.stat().st_mtime < 50


def test_shorter_lists_stay(folder, store):
    for length in (4, 5, 3):
        keep(store, range(length))
    assert kept(folder) == [tuple(range(length)) for length in (3, 4, 5)]


def test_the_one_used_longest_ago_goes_first(folder):
    one = file_bytes(IDENTITY, 3, 0, 1000)
    store = PrefixStore(folder, IDENTITY, max_bytes=3 * one, max_file_bytes=one)
    other = PrefixStore(folder, OTHER, max_bytes=3 * one, max_file_bytes=one)
    keep(other, [0, 0, 0])
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    for number in (1, 2):
        keep(store, [number] * 3)
        age(store, [number] * 3, 100 - number)
    (folder / "notes.txt").write_bytes(b"a person's own" * 10_000)
    keep(store, [3] * 3)  # the other model's goes
    assert kept(folder) == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
    assert store.load(store.longest([1, 1, 1]))
    keep(store, [4] * 3)
    assert kept(folder) == [(1, 1, 1), (3, 3, 3), (4, 4, 4)]
    assert sum(path.stat().st_size for path in folder.glob("*.prefix")) <= store.max_bytes
    assert (folder / "notes.txt").exists()
    for path in folder.glob("*.prefix"):
        os.utime(path, ns=(1, time.time_ns() + 10**12))  # a clock that was set back: the next file looks the oldest
    tight = PrefixStore(folder, IDENTITY, max_bytes=one, max_file_bytes=one)
    keep(tight, [5] * 3)
    assert kept(folder) == [(5, 5, 5)]  # never the one just written


def test_what_is_too_large_is_not_kept(folder):
    store = PrefixStore(folder, IDENTITY, max_bytes=4000)
    assert not store.save([1], (), bytes(2000))
    assert not folder.exists()
    assert store.save([1], (), bytes(1000))
    assert store.warning is None
    PrefixStore(folder, IDENTITY).save([2], (), bytes(3500))  # by a process with another limit
    assert store.longest([2]) is None
    assert PrefixStore(folder, IDENTITY).longest([2])  # it is no match, and nobody's to remove
    assert store.warning is None


def test_a_giant_goes_before_all_that_is_good(folder, store):
    keep(store, [1])
    giant = folder / next(folder.iterdir()).name.replace(".v1.", ".v2.")
    giant.touch()
    os.truncate(giant, 1 << 40)
    keep(store, [2])
    assert kept(folder) == [(1,), (2,)]
    assert not giant.exists()


def test_what_killed_writers_left_is_removed_later(folder, store):
    keep(store, [1])
    name = next(folder.iterdir()).name
    old, new = folder / f".{name}-abc_1234.part", folder / f".{name}-defg5678.part"
    old.touch()
    new.touch()
    os.utime(old, ns=(1, 1))
    keep(store, [2])
    assert not old.exists()
    assert new.exists()  # its writer may be at work


@pytest.mark.parametrize(
    ("num_tokens", "prefill_s", "payload_bytes", "worth"),
    [
        (1431, 5.5, 33_000_000, True),
        (256, 0.5, 6_000_000, True),
        (255, 5.0, 6_000_000, False),
        (5000, 0.49, 1000, False),
        (10_000, 3.0, 1_310_000_000, False),  # 131 kB a token on a fast GPU: reading takes longer
        (10_000, 60.0, 1_310_000_000, True),
    ],
)
def test_worth_keeping(num_tokens, prefill_s, payload_bytes, worth):
    assert worth_keeping(num_tokens, prefill_s=prefill_s, payload_bytes=payload_bytes) is worth


# damage


def damage(draw: random.Random, good: bytes, others: list[bytes]) -> bytes | str:
    """One damaged file: its bytes, or what stands in its place."""
    bits = bytearray(good)
    for _ in range(draw.choice([1, 1, 2, 50])):
        bits[draw.randrange(len(bits) if draw.random() < 0.5 else 400)] ^= 1 << draw.randrange(8)
    start = draw.randrange(len(good))
    claim = draw.choice([2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
    return draw.choice(
        [
            bytes(bits),
            bytes(bits),
            good[:start],
            good + draw.randbytes(draw.randrange(1, 100)),
            good[:start] + good[start + 1 :],
            good[:start] + draw.randbytes(64) + good[start + 64 :],
            good[:12] + draw.randbytes(4) + good[16:],
            good.replace(b'"num_tokens":', b'"num_tokens":%d' % claim),
            good.replace(b'"payload_bytes":', b'"payload_bytes":%d' % claim),
            bytes(len(good)),
            draw.randbytes(len(good)),
            draw.choice(others),  # another list's file, or another model's
            b"",
            "folder",
            "link",
            "pipe",
            "sparse",
        ]
    )


def put(path: Path, what: bytes | str, good: Path) -> None:
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to(good)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "sparse":
        shutil.copy(good, path)
        os.truncate(path, 1 << 38)
    else:
        path.write_bytes(what)


def test_500_damaged_files(tmp_path, folder):
    draw = random.Random(500)
    token_ids = list(range(300))
    write(tmp_path / "good", IDENTITY, token_ids, (), state(token_ids))
    write(tmp_path / "shorter", IDENTITY, token_ids[:200], (), state(token_ids[:200]))
    write(tmp_path / "foreign", OTHER, token_ids, (), state(token_ids))
    good = (tmp_path / "good").read_bytes()
    others = [(tmp_path / name).read_bytes() for name in ("shorter", "foreign")]
    keep(PrefixStore(folder, IDENTITY), token_ids)
    (path,) = folder.iterdir()
    faults: dict[str, int] = {}
    for number in range(500):
        what = damage(draw, good, others)
        put(path, what, tmp_path / "good")
        message = f"damage {number}: {what[:40]!r}"
        started = time.thread_time()
        tracemalloc.start()
        try:
            fault = why_refused(path, message)
            store = PrefixStore(folder, IDENTITY)
            found = store.longest(token_ids)
            assert found is None or store.load(found) is None, message
            assert tracemalloc.get_traced_memory()[1] < 4 << 20, message
        finally:
            tracemalloc.stop()
        assert time.thread_time() - started < 2, message
        faults[fault] = faults.get(fault, 0) + 1
        if fault == "damaged":
            assert store.warning is not None, message
            assert path.name in store.warning, message
            assert what == "folder" or not os.path.lexists(path), message
        else:
            assert store.warning is None, message
            assert path.exists(), message
        if what == "folder":
            path.rmdir()
        keep(store, token_ids)  # a good one takes its place
        assert store.load(store.longest(token_ids)) == (tuple(token_ids), (), state(token_ids)), message
    assert set(faults) == {"damaged", "foreign", "newer"}, faults


def why_refused(path: Path, message: str) -> str:
    """The fault for which the file is refused; one that is whole is another list's under a name that is not its own."""
    try:
        assert len(read(path, IDENTITY)[0]) == 200, message
    except PrefixFileError as error:
        assert error.reason, message
        return error.fault
    return "damaged"


def test_one_warning_for_any_number_of_damaged_files(folder, store):
    for number in range(5):
        keep(store, [number])
    for path in folder.iterdir():
        path.write_bytes(b"not a state")
    assert store.longest([3]) is None
    assert store.warning is not None
    assert store.warning.startswith("A stored prefix is damaged and was removed: ")
    assert store.warning.endswith(": it ends after 11 bytes. (4 more like it)")
    assert list(folder.iterdir()) == []


def test_damage_that_comes_after_it_was_found(store):
    keep(store, [1, 2, 3])
    found = store.longest([1, 2, 3])
    with found.path.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(b"\0")
    assert store.load(found) is None
    assert "checksum" in store.warning
    assert store.longest([1, 2, 3]) is None


def test_what_llama_cpp_refuses_is_not_found_again(store):
    keep(store, [1, 2, 3])
    store.discard(store.longest([1, 2, 3]), "llama.cpp refused it")
    assert store.longest([1, 2, 3]) is None
    assert store.warning is not None
    assert store.warning.endswith("llama.cpp refused it.")


# a folder that cannot be used


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    store = PrefixStore(tmp_path / "file" / "prefixes", IDENTITY)
    assert store.longest([1]) is None
    assert not store.save([1], (), b"x")
    assert "Not a directory" in store.warning


def child(*arguments: object, shell: str = "") -> subprocess.CompletedProcess[str]:
    """This file as a program in a process of its own, after what `shell` does."""
    run = [sys.executable, __file__, *map(str, arguments)]
    command = ["unshare", "-m", "sh", "-c", f'{shell} && exec "$@"', "sh", *run] if shell else run
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_no_file_may_grow_further(folder):
    done = child("limited", folder)
    assert done.returncode == 0, done.stderr
    assert "would be larger than this system allows (100,000 bytes)" in done.stdout


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False).returncode == 0


def test_a_full_disk_and_one_that_cannot_be_written(folder):
    if not can_mount():
        pytest.skip("needs to mount a small disk: only root may")
    folder.mkdir()
    done = child("full", folder, shell=f"mount -t tmpfs -o size=1m tmpfs {folder}")
    assert done.returncode == 0, done.stderr
    assert f"the disk of {folder} is full" in done.stdout
    assert "mounted read-only" in done.stdout


# many processes, any of them killed


def test_kills_at_any_point_with_two_writers(folder):
    done = child("killed", folder, 100)
    print(done.stdout)
    assert done.returncode == 0, done.stderr


def limited(folder: Path) -> None:
    store = PrefixStore(folder, IDENTITY)
    keep(store, [1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    assert not store.save([2], (), bytes(200_000))
    assert kept(folder) == [(1,)]
    assert len(list(folder.iterdir())) == 1
    keep(store, [3])
    print(store.warning)


def full(folder: Path) -> None:
    store = PrefixStore(folder, IDENTITY)
    number = 0
    while store.save([number], (), state([number], 90_000)):
        number += 1
    print(store.warning)
    assert number > 5
    assert kept(folder) == [(token,) for token in range(number)]
    assert not list(folder.glob(".*"))
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    reader = PrefixStore(folder, IDENTITY)
    assert reader.load(reader.longest([3])) == ((3,), (), state([3], 90_000))
    assert reader.warning is None
    assert not reader.save([0, 0], (), b"x")
    print(reader.warning)
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
    for path in list(folder.iterdir()):
        path.unlink()
    keep(store, [1])


def work(folder: Path, seed: int) -> None:
    """Save, find and load for ever; leave with 1 at the first thing that is not as it should be."""
    draw = random.Random(seed)
    store = PrefixStore(folder, IDENTITY, max_bytes=1_500_000)
    while True:
        token_ids = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
        found = store.longest(token_ids)
        loaded = store.load(found) if found else None
        if loaded:
            assert loaded[2] == state(loaded[0], 200_000)
            assert list(loaded[0]) == token_ids[: found.num_tokens]
        assert store.save(token_ids, (), state(token_ids, 200_000))
        assert store.warning is None, store.warning


def _stored(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def killed(folder: Path, num_rounds: int) -> None:
    """Two workers at a time, both killed after some milliseconds; then nothing damaged stands under a name."""
    draw = random.Random(9)
    num_cut_off = num_good = 0
    for number in range(num_rounds):
        workers, before = [], _stored(folder)
        for seed in (2 * number, 2 * number + 1):
            worker = os.fork()
            if not worker:
                try:
                    work(folder, seed)
                finally:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            workers.append(worker)
        while number % 2 and _stored(folder) == before:
            time.sleep(0.001)  # of every other round the workers are at work when they are killed, however busy the machine is
        time.sleep(draw.uniform(0.001, 0.03))
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        for worker in workers:
            status = os.waitpid(worker, 0)[1]
            assert os.WIFSIGNALED(status), f"round {number}: a worker failed"
        for path in folder.glob("*.prefix"):
            token_ids, _, payload = read(path, IDENTITY)
            assert payload == state(token_ids, 200_000), f"round {number}"
            num_good += 1
        for part in folder.glob(".*.part"):
            os.utime(part, ns=(1, 1))  # as if ten minutes had passed
            num_cut_off += 1
    store = PrefixStore(folder, IDENTITY, max_bytes=1_500_000)
    assert store.save([7], (), b"x")
    assert not list(folder.glob(".*"))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1_500_000
    print(f"{num_rounds} rounds, {num_good} whole files read, {num_cut_off} writes cut off")
    assert num_good >= num_rounds
    assert num_cut_off >= num_rounds // 20


def main(what: str, folder: str, *numbers: str) -> None:
    {"limited": limited, "full": full, "killed": killed}[what](Path(folder), *map(int, numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
