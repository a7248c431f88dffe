"""Generation: one compilation, no influence of padding, the fast path equal to the full one."""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cli.main import main
from shared.generation.generate import Display, empty_cache, generate, next_tokens, sample_token
from shared.model.decoding import Cache, abstract_cache, make_decode
from shared.model.state import initial_state, make_forward
from shared.placement.mesh import make_mesh
from shared.placement.placing import place
from shared.twin import Twin
from tests.runs import TWINS, train
from tests.small import small_config

NAMES = list(TWINS)


def build(name: str, devices: int, **changes: object) -> Twin:
    config = small_config(**changes)
    return TWINS[name](config, make_mesh(config.strategy, devices))


def text(twin: Twin, prompt: bytes, tokens: int, **options: object) -> np.ndarray:
    """(tokens, B)."""
    return np.array(list(generate(twin, twin.init(jax.random.key(0)), prompt, tokens, **options)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_cached_logits_equal_those_of_the_full_forward_pass_at_every_position(dtype: str, float64: None):
    """Whether the tokens come all at once, one by one, or in pieces, and whatever the cache held before."""
    config = small_config(dtype=dtype, param_dtype=dtype if dtype == "float64" else "float32", layers=3, unroll=2)
    params = initial_state(config, jax.random.key(0)).params
    tokens = jax.random.randint(jax.random.key(1), (config.batch, config.model.seq_len), 0, 256)
    expected = np.asarray(make_forward(config)(params, tokens), np.float64)
    decode = jax.jit(make_decode(config))
    rtol = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.05}[dtype]
    for pieces in ([8], [1] * 8, [3, 1, 4]):
        cache = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 7, leaf.dtype), abstract_cache(config))
        start, found = 0, []
        for size in pieces:
            logits, cache = decode(params, cache, tokens[:, start : start + size], jnp.int32(start))
            found.append(np.asarray(logits, np.float64))
            start += size
        difference = np.abs(np.concatenate(found, axis=1) - expected).max()
        assert difference < rtol * np.abs(expected).max(), pieces


@pytest.mark.parametrize("name", NAMES)
def test_cached_and_full_generation_draw_the_same_text(name: str):
    """Beyond the window, where the buffer's last half becomes its beginning, more than once; for odd windows too."""
    for window in (7, 2, 1) if name == NAMES[0] else (8,):
        twin = build(name, 2, seq_len=window)
        for prompt in (b"", b"a", b"a prompt longer than the window"):
            np.testing.assert_array_equal(text(twin, prompt, 25), text(twin, prompt, 25, cached=False))


def test_the_twins_generate_the_same_text_on_any_devices():
    """Rows are split over devices; a row's text depends on its number and the seed, not on how many there are."""
    expected = text(build("auto_sharding", 1, batch=8), b"once", 30, seed=5)
    for name in NAMES:
        for devices in (2, 8):
            np.testing.assert_array_equal(text(build(name, devices, batch=8), b"once", 30, seed=5), expected)
    np.testing.assert_array_equal(text(build("auto_sharding", 1, batch=2), b"once", 30, seed=5), expected[:, :2])
    assert (text(build("auto_sharding", 1, batch=8), b"once", 30, seed=6) != expected).any()
    assert len({tuple(column) for column in expected.T}) == 8, "all rows drew the same text"


@pytest.mark.parametrize("strategy", ["fsdp_context_tensor", pytest.param("sequence_parallel", marks=pytest.mark.slow)])
def test_every_strategy_generates_the_same_text(strategy: str):
    """With parameters and cache split; and sequences, which further tokens are too few to be split over."""
    changes = {"batch": 2, "heads": 8}
    expected = text(build("auto_sharding", 1, **changes), b"once", 12)
    for name in NAMES:
        twin = build(name, 8, strategy=strategy, **changes)
        np.testing.assert_array_equal(text(twin, b"once", 12), expected)
        np.testing.assert_array_equal(text(twin, b"once", 3, cached=False), expected[:3])


@pytest.mark.parametrize("cached", [True, False])
def test_the_model_compiles_once_for_any_prompt_and_any_length(cached: bool):
    """One program of a whole window, and with a cache another one of a single token."""
    twin = build("auto_sharding", 2)
    for prompt, tokens in ((b"", 3), (b"x", 20), (b"five!", 1), (b"much longer than a window", 9)):
        text(twin, prompt, tokens, cached=cached, temperature=0.5, top_k=3, seed=tokens)
    assert next_tokens(twin, cached)._cache_size() == (2 if cached else 1)


@pytest.mark.parametrize("cached", [True, False])
def test_what_pads_the_buffer_changes_nothing(cached: bool, monkeypatch: pytest.MonkeyPatch):
    twin = build("explicit_shardmap", 2)
    expected = text(twin, b"abc", 20, cached=cached)
    zeros = np.zeros

    def rubbish(shape: object, *rest: object) -> np.ndarray:
        made = zeros(shape, *rest)
        return made + 99 if made.shape == (8, 8) else made

    monkeypatch.setattr("shared.generation.generate.np.zeros", rubbish)
    np.testing.assert_array_equal(text(twin, b"abc", 20, cached=cached), expected)


def test_a_prompt_longer_than_the_window_is_cut_to_its_end():
    twin = build("auto_sharding", 1)
    end = b"12345678"
    np.testing.assert_array_equal(text(twin, b"anything before " + end, 5), text(twin, end, 5))
    assert (text(twin, b"12345670", 5, seed=1) != text(twin, end, 5, seed=1)).any()


def test_drawing():
    """Frequencies follow the softmax at the temperature, among the top k; temperature 0 is the likeliest."""
    logits = jnp.tile(jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4])), (4000, 1))
    call = jax.jit(sample_token)

    def frequencies(temperature: float, top_k: int) -> np.ndarray:
        sampled = call(logits, np.int32(0), np.float32(temperature), np.int32(top_k), np.uint32(0))
        return np.bincount(sampled, minlength=4) / 4000

    np.testing.assert_allclose(frequencies(1, 0), [0.1, 0.2, 0.3, 0.4], atol=0.03)
    np.testing.assert_allclose(frequencies(1, 9), [0.1, 0.2, 0.3, 0.4], atol=0.03)
    np.testing.assert_allclose(frequencies(1, 2), [0, 0, 3 / 7, 4 / 7], atol=0.03)
    np.testing.assert_allclose(frequencies(0.5, 0), np.array([1, 4, 9, 16]) / 30, atol=0.03)
    assert frequencies(0, 0).tolist() == frequencies(1, 1).tolist() == [0, 0, 0, 1]


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_bytes_are_shown_safely_however_they_are_cut(data: bytes, cuts: list[int]):
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    show = Display()
    shown = "".join(show(data[a:b]) for a, b in itertools.pairwise(places)) + show(b"", last=True)
    assert shown == Display()(data, last=True)
    assert all(character.isprintable() or character in "\n\t" or ord(character) > 0x9F for character in shown)
    assert "\x1b" not in shown


def test_display():
    assert Display()("größer\n\t€".encode(), last=True) == "größer\n\t€"
    assert Display()(b"a\xff\xc3(\x1b[2J\r", last=True) == r"a\xff\xc3(\x1b[2J\r"
    show = Display()
    assert [show(bytes([byte])) for byte in "€".encode()] == ["", "", "€"]


def test_the_cache_is_placed_and_donated():
    twin = build("explicit_shardmap", 4)
    cache = empty_cache(twin)
    assert isinstance(cache, Cache)
    assert cache.keys.sharding.shard_shape(cache.keys.shape)[1] == 2  # 8 rows over 4 devices
    tokens = place(twin.plan.layout, np.zeros((8, 1), np.int32), twin.plan.layout.batch.tokens)
    twin.decode(twin.init(jax.random.key(0)), cache, tokens, np.int32(0))
    assert cache.keys.is_deleted()


def test_generate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Both twins print the same; the text alone goes to standard output."""
    assert train(tmp_path, "--steps", 3, "--devices", 2) == 0
    capsys.readouterr()
    printed = []
    for name in NAMES:
        command = ["generate", "--checkpoint-dir", str(tmp_path / "checkpoints"), "--prompt", "the ", "--samples", "2"]
        main(TWINS[name], name, [*command, "--tokens", "20", "--devices", "2"])
        out, err = capsys.readouterr()
        printed.append(out)
        assert "tokens/s in each of 2 rows" in err
    assert printed[0] == printed[1]
    first, second = printed[0].split("\n---\n")
    assert first.startswith("the ")
    assert second.startswith("the ")
    assert first != second.rstrip("\n")


ERRORS = {
    "--tokens 0": "tokens is 0; give at least 1",
    "--temperature -1": "temperature is -1.0; give at least 0.001 and at most 1000.0",
    "--top-k -1": "top_k is -1; give at least 0 and at most 1000000000",
    "--samples 0": "samples is 0; give at least 1",
    "--seed -1": "seed is -1; give at least 0 and at most 4294967295",
    "--tokens 99999999999": "tokens is 99999999999; give at least 1 and at most 1000000000",
    "--temperature inf": "temperature is inf; give at least 0.001 and at most 1000.0",
    "--temperature nan": "temperature is nan; give at least 0.001 and at most 1000.0",
    "--top-k 100000000000": "top_k is 100000000000; give at least 0 and at most 1000000000",
    "--samples 100000000000": "samples is 100000000000; give at least 1 and at most 10000",
    "--checkpoint-dir {missing}": "no checkpoint in {missing}; give a folder that `train` saved to",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_bad_input(arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    missing = str(tmp_path / "missing")
    with pytest.raises(SystemExit) as ended:
        main(
            TWINS["auto_sharding"],
            "auto_sharding",
            ["generate", "--checkpoint-dir", missing, *arguments.format(missing=missing).split()],
        )
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: " + ERRORS[arguments].format(missing=missing))


def test_a_prompt_that_is_no_utf8(tmp_path: Path):
    """What a shell passes on is what the model is given, and it is shown safely."""
    import subprocess

    assert train(tmp_path, "--steps", 1, "--devices", 1) == 0
    command = [sys.executable, "-m", "auto_sharding", "generate", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    done = subprocess.run(
        [*command, "--tokens", "1", "--prompt", b"\xff\x1bx"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(rb"\xff\x1bx")
