"""The memory plan, the largest window that fits, and the slot: the least of what was requested, trained for and fits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.engine import memory
from localrag.engine.echo import open_echo
from localrag.engine.loading import attention_kept, open_model
from localrag.engine.memory import RESERVE_BYTES, Situation, as_if_unloaded, fit_together, nearest, plan
from localrag.errors import EngineError, UsageError
from tests.gguf_files import write_model

MIB = 1024 * 1024
INFO = replace(  # the default model's shape
    open_echo().info,
    file_size=98_362_432,
    num_layers=30,
    num_heads=9,
    num_kv_heads=(3,) * 30,
    layer_kv=((192, 192),) * 30,
    embedding_length=576,
    head_size_k=64,
    head_size_v=64,
    n_ctx_train=8192,
    vocab_size=49_152,
    tokenizer_model="gpt2",
)
ROOMY = Situation(available_bytes=1 << 50, gpu_available_bytes=1 << 50, python_bytes=25 * MIB)


def test_kv_bytes_are_those_that_were_measured():
    assert INFO.kv_bytes_per_token == 23_040
    assert plan(INFO, 2048, situation=ROOMY).kv_bytes == 45 * MIB
    assert plan(INFO, 8192, situation=ROOMY).kv_bytes == 180 * MIB
    assert plan(INFO, 8192, 1, "q8_0", flash_attention=True, situation=ROOMY).kv_bytes == 180 * MIB * 17 // 32


def test_cells_are_padded_as_llama_cpp_pads_them():
    assert [plan(INFO, n, situation=ROOMY).n_ctx for n in (1, 256, 257, 1000)] == [256, 256, 512, 1024]


@pytest.mark.parametrize(
    ("n_ctx", "flash", "measured_mib"),
    [(2048, False, 243), (2048, True, 200), (8192, False, 557), (8192, True, 341)],
)
def test_peaks_that_were_measured(n_ctx, flash, measured_mib):
    predicted = plan(INFO, n_ctx, flash_attention=flash, situation=ROOMY)
    assert predicted.total / MIB == pytest.approx(measured_mib, rel=0.10)
    assert predicted.total == sum(
        (
            predicted.weights_bytes,
            predicted.copied_bytes,
            predicted.kv_bytes,
            predicted.compute_bytes,
            predicted.python_bytes,
            predicted.embedder_bytes,
        )
    )


def test_what_the_process_holds_is_not_needed_again():
    made = plan(INFO, 2048, situation=ROOMY)
    assert made.needed == made.total - ROOMY.python_bytes
    with_embedder = plan(INFO, 2048, situation=replace(ROOMY, embedder_bytes=100))
    assert with_embedder.total == made.total + 100


def test_weights_in_another_layout_count_for_the_peak_and_not_for_what_must_fit():
    plain, copied = (plan(replace(INFO, quantization=name), 2048, situation=ROOMY) for name in ("Q4_1", "Q4_0"))
    assert copied.total > plain.total + INFO.file_size // 2
    assert copied.needed == plain.needed
    assert plan(replace(INFO, quantization="Q4_K_M"), 2048, situation=ROOMY).repacked_bytes == 0  # rows of 576 are no K-quants
    assert plan(replace(INFO, quantization="Q4_K_M", embedding_length=512), 2048, situation=ROOMY).repacked_bytes > 0


@pytest.mark.parametrize(("layers", "share"), [(0, 0.0), (31, 1.0), (999, 1.0)])
def test_layers_on_a_gpu(layers, share):
    made = plan(INFO, 2048, gpu_layers=layers, situation=ROOMY)
    on_gpu = made.weights_bytes + made.kv_bytes + made.compute_bytes
    assert made.gpu_bytes == int(share * on_gpu)
    small = plan(INFO, 2048, gpu_layers=layers, situation=replace(ROOMY, gpu_available_bytes=MIB))
    assert small.fits is (layers == 0)
    if layers:
        with pytest.raises(EngineError, match="of the GPU"):
            memory.require(small, INFO)


def test_what_is_loaded_is_not_asked_of_the_gpu_again():
    loaded = replace(ROOMY, is_loaded=True)
    made = plan(INFO, 2048, gpu_layers=99, situation=loaded)
    assert made.gpu_bytes == made.kv_bytes + made.compute_bytes
    assert (made.weights_bytes, made.copied_bytes) == (0, 0)


@pytest.mark.parametrize(("layers", "gpu_mib"), [(0, 0), (31, 600), (31, 300)])
def test_models_fit_at_once_if_their_needs_add_up_to_what_is_free(layers, gpu_mib):
    one, other = (plan(INFO, n_ctx, gpu_layers=layers, situation=ROOMY) for n_ctx in (2048, 4096))
    free, on_gpu = one.needed + other.needed + RESERVE_BYTES, gpu_mib * MIB
    enough = one.gpu_bytes + other.gpu_bytes <= on_gpu
    assert enough is (gpu_mib != 300)
    assert fit_together([one, other], available_bytes=free, gpu_available_bytes=on_gpu) is enough
    assert not fit_together([one, other], available_bytes=free - 1, gpu_available_bytes=on_gpu)
    assert fit_together([one], available_bytes=free - 1, gpu_available_bytes=one.gpu_bytes)


@pytest.mark.parametrize("layers", [0, 31])
def test_an_open_model_takes_all_but_its_mapped_file(layers):
    made = plan(replace(INFO, quantization="Q4_0"), 2048, gpu_layers=layers, situation=ROOMY)
    on_host = made.copied_bytes + (0 if layers else made.kv_bytes + made.compute_bytes)
    assert made.committed == on_host
    assert made.gpu_weights_bytes == (INFO.file_size if layers else 0)


@pytest.mark.parametrize("layers", [0, 31])
def test_the_plan_of_a_context_tells_what_the_whole_model_takes(layers):
    context = plan(INFO, 2048, 3, gpu_layers=layers, situation=replace(ROOMY, is_loaded=True))
    whole = as_if_unloaded(context, INFO)
    assert whole == replace(plan(INFO, 2048, 3, gpu_layers=layers, situation=ROOMY), python_bytes=0)
    summary = whole.to_summary()
    parts = whole.weights_bytes + whole.copied_bytes + whole.kv_bytes + whole.compute_bytes
    assert (summary["predicted_bytes"], summary["available_bytes"]) == (parts, ROOMY.available_bytes)
    assert (summary["num_cells"], summary["num_sequences"], summary["kv_type"], summary["gpu_layers"]) == (2048, 3, "f16", layers)
    assert summary["gpu_bytes"] == (parts - whole.copied_bytes if layers else 0)


@pytest.mark.parametrize(("kv_type", "flash"), [("q9", True), ("q8_0", False), ("", False)])
def test_a_kv_type_that_cannot_be_is_refused(kv_type, flash):
    with pytest.raises(EngineError, match="KV cache"):
        plan(INFO, 2048, 1, kv_type, flash_attention=flash, situation=ROOMY)


@given(st.integers(0, 2 * 10**9), st.booleans(), st.integers(1, 16), st.integers(1, 100_000))
def test_the_nearest_fits_and_the_next_block_does_not(available, flash, num_sequences, n_ctx_train):
    info = replace(INFO, n_ctx_train=n_ctx_train)
    situation = Situation(available_bytes=available, python_bytes=0)
    near = nearest(info, num_sequences, flash_attention=flash, situation=situation)
    assert 0 <= near <= n_ctx_train
    if near:
        assert plan(info, near, num_sequences, flash_attention=flash, situation=situation).fits
    if near < n_ctx_train:
        assert not plan(info, near + 256, num_sequences, flash_attention=flash, situation=situation).fits


@given(st.integers(1, 50_000), st.integers(1, 50_000), st.booleans())
def test_a_longer_window_never_takes_less(one, other, flash):
    short, long = sorted((one, other))
    assert plan(INFO, short, flash_attention=flash, situation=ROOMY).total <= plan(INFO, long, flash_attention=flash, situation=ROOMY).total


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_nearest():
    situation = Situation(available_bytes=RESERVE_BYTES + 300 * MIB, python_bytes=0)
    made = plan(INFO, 8192, situation=situation)
    near = nearest(INFO, situation=situation)
    assert 0 < near < 8192
    with pytest.raises(EngineError, match=r"does not fit .* it needs 5\d\d MiB, and 300 MiB are available") as refused:
        memory.require(made, INFO, situation=situation)
    assert refused.value.numbers["nearest_n_ctx"] == near
    assert str(near) in refused.value.hint
    memory.require(plan(INFO, near, situation=situation), INFO)
    with pytest.raises(EngineError) as hopeless:
        memory.require(plan(INFO, 256, situation=Situation(available_bytes=0)), INFO)
    assert hopeless.value.numbers["nearest_n_ctx"] == 0
    assert "smaller model" in hopeless.value.hint


def test_the_memory_that_is_free_is_looked_up():
    assert 0 < plan(INFO, 256).available == pytest.approx(memory.available_memory(), rel=0.5)
    assert plan(INFO, 256).python_bytes > MIB


def test_a_container_can_have_less_than_the_machine(tmp_path):
    files = {"memory.max": f"{100 * MIB}\n", "memory.current": f"{60 * MIB}\n"}
    files["memory.stat"] = f"anon 1\nactive_file {10 * MIB}\ninactive_file {5 * MIB}\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory.available_memory(tmp_path) == 55 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory(tmp_path) > 55 * MIB
    (tmp_path / "memory.max").write_text("nonsense")
    assert memory.available_memory(tmp_path) > 55 * MIB


@pytest.mark.parametrize(
    ("requested", "fitting", "n_ctx", "bound"),
    [
        (None, 10**6, 8192, "training"),
        (4096, 10**6, 4096, "requested"),
        (8192, 10**6, 8192, "requested"),
        (100_000, 10**6, 8192, "training"),
        (None, 1000, 1000, "memory"),
        (4096, 1000, 1000, "memory"),
        (500, 1000, 500, "requested"),
    ],
)
def test_the_least_limit_binds_and_is_named(requested, fitting, n_ctx, bound):
    slot = memory.make_slot(INFO, requested, fitting=fitting)
    assert (slot.n_ctx, slot.bound, slot.requested, slot.n_ctx_train) == (n_ctx, bound, requested, 8192)


@pytest.mark.parametrize(("requested", "n_ctx", "bound"), [(4096, 4096, "requested"), (None, memory.MAX_UNSAID_TOKENS, "training")])
def test_a_vocabulary_that_does_not_say_what_it_was_trained_for_has_a_window(requested, n_ctx, bound):
    slot = memory.make_slot(replace(INFO, n_ctx_train=0), requested, fitting=10**9)
    assert (slot.n_ctx, slot.bound) == (n_ctx, bound)
    assert slot.n_ctx <= slot.n_ctx_train


def test_a_model_that_does_not_fit_and_a_window_of_nothing_are_refused():
    with pytest.raises(EngineError, match="does not fit"):
        memory.make_slot(INFO, None, fitting=0)
    with pytest.raises(UsageError):
        memory.make_slot(INFO, 0, fitting=10)


def test_a_context_that_does_not_fit_is_refused_before_it_is_made(tmp_path):
    path = write_model(tmp_path / "wide.gguf", changes={"llama.context_length": 1 << 27})
    with open_model(path, name="wide") as engine:
        slot = engine.make_slot(None)
        assert slot.bound == "memory"
        assert slot.n_ctx < 1 << 27
        with pytest.raises(EngineError, match="does not fit") as refused:
            engine.reserve(1 << 27)
        assert 0 < refused.value.numbers["nearest_n_ctx"] < 1 << 27
        engine.reserve(256)  # the engine is as it was


def test_a_window_may_have_the_cells_that_are_there_where_no_more_fit(tmp_path):
    with open_model(write_model(tmp_path / "m.gguf"), name="m") as engine:
        engine.reserve(256)
        backend = engine._backend
        backend.info = replace(backend.info, layer_kv=((1 << 40, 1 << 40),))  # no machine has the memory for a context of this
        slot = engine.make_slot(None)
    assert (slot.n_ctx, slot.bound) == (256, "memory")


def test_the_attention_kernel_that_is_known(tmp_path):
    assert attention_kept(tmp_path) is False
    for text, known in (('{"flash_attention": true}', True), ('{"flash_attention": 1}', False), ("[]", False), ("{", False)):
        (tmp_path / "attention.json").write_text(text)
        assert attention_kept(tmp_path) is known
