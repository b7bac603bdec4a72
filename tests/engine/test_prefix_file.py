"""engine/prefix_file.py: what was written comes back, and anything else is refused before it costs memory or time."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import struct
import tracemalloc
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.prefix_file import (
    MAX_HEADER_BYTES,
    VERSION,
    Identity,
    PrefixFileError,
    file_bytes,
    model_fingerprint,
    read,
    read_head,
    write,
)
from localrag.errors import ModelFileError

IDENTITY = Identity(
    model="model.gguf:98:1:00ff",
    llama_build="0.3.36 AVX2",
    architecture="llama",
    type_k="f16",
    type_v="f16",
    flash_attention=True,
    n_ctx_train=8192,
    rope_freq_base=100000.0,
)
TOKENS = (1, 2, 3, 0, 2**32 - 1)
BORDERS = (2, 5)
PAYLOAD = bytes(range(256)) + b"state"


def refused(path: Path, identity: Identity = IDENTITY, **limits: int) -> PrefixFileError:
    """Why a file is refused, and that this costs less than a MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(PrefixFileError) as caught:
            read(path, identity, **limits)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.reason
    return caught.value


def whole(header: bytes, numbers: bytes = struct.pack("<4I", 1, 2, 3, 3), payload: bytes = b"state", version: int = VERSION) -> bytes:
    """A file with a right checksum around any header."""
    body = struct.pack("<8sII", b"LRPREFIX", version, len(header)) + header + numbers + payload
    return body + hashlib.sha256(body).digest()


def header(**changes: object) -> bytes:
    said = {"created": 1, "identity": asdict(IDENTITY), "num_tokens": 3, "num_borders": 1, "payload_bytes": 5} | changes
    return json.dumps(said).encode()


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "prefix"
    write(path, IDENTITY, TOKENS, BORDERS, PAYLOAD)
    return path


texts = st.text(max_size=40)
identities = st.builds(
    Identity,
    model=st.text(st.characters(), max_size=300),  # with lone surrogates: a file's name may have them
    llama_build=texts,
    architecture=texts,
    type_k=texts,
    type_v=texts,
    flash_attention=st.booleans(),
    n_ctx_train=st.integers(),
    n_swa=st.integers(0),
    rope_scaling=st.none() | texts,
    rope_freq_base=st.none() | st.floats(),
    rope_freq_scale=st.none() | st.floats(),
)


@settings(deadline=None)
@given(
    identity=identities,
    token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300),
    breakpoints=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    payload=st.binary(min_size=1, max_size=3000),
    kind=st.sampled_from([bytes, bytearray, memoryview]),
)
def test_round_trip(tmp_path_factory, identity, token_ids, breakpoints, payload, kind):
    path = tmp_path_factory.getbasetemp() / "round-trip"
    write(path, identity, token_ids, breakpoints, kind(payload))
    assert read(path, identity) == (tuple(token_ids), tuple(breakpoints), payload)
    head = read_head(path, identity)
    assert head.token_bytes == struct.pack(f"<{len(token_ids)}I", *token_ids)
    assert head.breakpoint_bytes == struct.pack(f"<{len(breakpoints)}I", *breakpoints)
    assert path.stat().st_size <= file_bytes(identity, len(token_ids), len(breakpoints), len(payload))
    assert list(path.parent.glob(".*.part")) == []


def test_wide_elements_count_as_bytes(tmp_path):
    write(tmp_path / "prefix", IDENTITY, [1], [], memoryview(bytes(range(16))).cast("Q"))
    assert read(tmp_path / "prefix", IDENTITY)[2] == bytes(range(16))


def test_only_the_owner_may_read_it(written):
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


@pytest.mark.parametrize(("token_ids", "payload"), [([], b"x"), ([1], b""), ([-1], b"x"), ([2**32], b"x"), ([1.5], b"x")])
def test_nothing_senseless_is_written(tmp_path, token_ids, payload):
    with pytest.raises(ValueError):
        write(tmp_path / "prefix", IDENTITY, token_ids, (), payload)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_what_was_there(tmp_path):
    (tmp_path / "prefix").mkdir()
    with pytest.raises(OSError, match="directory"):
        write(tmp_path / "prefix", IDENTITY, TOKENS, BORDERS, PAYLOAD)
    assert [path.name for path in tmp_path.iterdir()] == ["prefix"]


@pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
def test_each_part_of_the_identity_tells_files_apart(written, name):
    value = getattr(IDENTITY, name)
    other = replace(IDENTITY, **{name: not value if isinstance(value, bool) else "other" if isinstance(value, str | None) else value + 1})
    assert other.digest != IDENTITY.digest
    assert refused(written, other).fault == "foreign"


def test_an_identity_has_an_end():
    with pytest.raises(ValueError, match="longer than"):
        replace(IDENTITY, llama_build="x" * MAX_HEADER_BYTES)


def test_every_flipped_bit_is_seen(written):
    good = written.read_bytes()
    faults: dict[str, int] = {}
    with written.open("r+b", buffering=0) as file:
        for bit in range(8 * len(good)):
            os.pwrite(file.fileno(), bytes([good[bit // 8] ^ 1 << bit % 8]), bit // 8)
            try:
                read(written, IDENTITY)
            except PrefixFileError as error:
                faults[error.fault] = faults.get(error.fault, 0) + 1
            os.pwrite(file.fileno(), good[bit // 8 : bit // 8 + 1], bit // 8)
    assert read(written, IDENTITY) == (TOKENS, BORDERS, PAYLOAD)
    assert sum(faults.values()) == 8 * len(good)
    assert set(faults) == {"damaged", "foreign", "newer"}  # other identities, and other versions
    assert faults["newer"] == 31  # bits of the version, of which one makes it 0
    assert faults["damaged"] >= 8 * (32 + len(PAYLOAD) + 4 * len(TOKENS) + 4 * len(BORDERS) + 8)


def test_every_length_but_the_right_one_is_seen(written):
    good = written.read_bytes()
    for length in (*range(len(good)), len(good) + 1, len(good) + 4, 2 * len(good)):
        written.write_bytes((good + good)[:length])
        with pytest.raises(PrefixFileError) as caught:
            read(written, IDENTITY)
        assert caught.value.fault == "damaged"


@pytest.mark.parametrize("claim", [0, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400, True, 3.0, "3", None, [3]])
@pytest.mark.parametrize("name", ["num_tokens", "num_borders", "payload_bytes"])
def test_claims_cost_nothing(tmp_path, name, claim):
    path = tmp_path / "prefix"
    path.write_bytes(whole(header(**{name: claim})))
    assert refused(path).fault == "damaged"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b"[" * 15_000,
        b'{"a":' * 3_000,
        b"9" * 15_000,
        b'"\xff\xfe"',
        b"\x00" * 100,
        header(identity=None),
        header()[:-1],
        header() + b"}",
        b" " * (MAX_HEADER_BYTES + 1),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_headers_that_are_none(tmp_path, text):
    path = tmp_path / "prefix"
    path.write_bytes(whole(text))
    assert refused(path).fault in {"damaged", "foreign"}


def test_the_helper_makes_good_files_too(tmp_path):
    path = tmp_path / "prefix"
    path.write_bytes(whole(header()))
    assert read(path, IDENTITY) == ((1, 2, 3), (3,), b"state")
    path.write_bytes(whole(header(), version=2))
    assert refused(path).fault == "newer"
    path.write_bytes(whole(header(), version=0))
    assert refused(path).fault == "damaged"


def test_sparse_giants_are_not_read(tmp_path):
    path = tmp_path / "prefix"
    start = whole(header(payload_bytes=1 << 40))[: -32 - 5]
    path.write_bytes(start)
    os.truncate(path, len(start) + (1 << 40) + 32)  # every size agrees
    assert refused(path).fault == "foreign"


def num_open_files() -> int:
    opened = Path("/proc/self/fd")
    return len(list(opened.iterdir())) if opened.is_dir() else 0


def test_what_is_no_file(tmp_path, written):
    num_open = num_open_files()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # opening one waits for a writer
    (tmp_path / "link").symlink_to(written)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").touch()
    for name in ("folder", "pipe", "link", "loop", "empty"):
        assert refused(tmp_path / name).fault == "damaged", name
    assert refused(tmp_path / "nothing").fault == "missing"
    assert refused(written / "below a file").fault == "unreadable"
    assert refused(written, max_bytes=written.stat().st_size - 1).fault == "foreign"
    assert num_open_files() == num_open


def test_any_bytes_are_refused(tmp_path):
    draw = random.Random(4)
    path = tmp_path / "prefix"
    good = whole(header())
    for _ in range(300):
        cut = draw.randrange(len(good))
        path.write_bytes(good[:cut] + draw.randbytes(draw.randrange(1, 200)) + good[cut + draw.randrange(200) :])
        with pytest.raises(PrefixFileError):
            read(path, IDENTITY)


def test_a_model_is_known_by_its_file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    first = model_fingerprint(path)
    assert first == model_fingerprint(path)
    assert first.startswith("model.gguf:7:")
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    later = model_fingerprint(path)
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(1, 1))
    assert len({first, later, model_fingerprint(path)}) == 3
    with pytest.raises(ModelFileError, match="cannot be read"):
        model_fingerprint(tmp_path / "nothing")
