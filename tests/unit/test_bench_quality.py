"""flashkv-bench quality: divergences of a tiny random model, CacheGen's scheme, the round trip."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from flashkv.tools import bench, quality_session
from flashkv.tools import bench_quality as quality
from flashkv.tools import quality_cachegen as cachegen
from flashkv.tools.bench_sets import BenchError
from flashkv.tools.bfloat16 import to_bits, to_float
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_llama
import torch
from flashkv.tools.quality_model import Divergence, Subject

PREFIX, POSITIONS = 128, 64


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.set_grad_enabled(False)
    return Subject(tiny_llama.make_model(), PREFIX, POSITIONS)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(5).integers(0, 256, PREFIX + POSITIONS).tolist()


@pytest.fixture(scope="module")
def text(subject: Subject, tokens: list[int]) -> quality.Text:
    return quality.prepare(subject, {"text": tokens}, lambda _: None)["text"]


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(1).normal(size=4096).astype(np.float32) * 1e3
    values[:2] = 1.00390625, 1.01171875  # ties: to even
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    assert (to_bits(values) == theirs.view(torch.int16).numpy().view(np.uint16)).all()
    assert (to_float(to_bits(values)) == theirs.float().numpy()).all()


def test_going_on_is_the_model_itself(subject: Subject, tokens: list[int]) -> None:
    """But for the cache's bfloat16: without it the distributions are those of one forward pass."""
    whole = subject.model(input_ids=torch.tensor([tokens])).logits[0, PREFIX:]
    expected = torch.log_softmax(whole, dim=-1)
    found = subject.go_on(tokens, subject.prefill(tokens))
    assert found.shape == (POSITIONS, 256)
    assert torch.allclose(found, expected, atol=0.3)
    assert (found - expected).abs().mean() < 0.02


def test_divergence_is_that_of_the_cache(
    subject: Subject, tokens: list[int], text: quality.Text
) -> None:
    same = subject.compare(text.exact, tokens, text.kv)
    assert same.kl.max() == 0.0
    assert same.kept.all()
    rng = np.random.default_rng(2)
    floats = to_float(text.kv)
    noise = rng.normal(size=floats.shape).astype(np.float32)
    little, much = (
        subject.compare(text.exact, tokens, to_bits(floats + size * floats.std() * noise))
        for size in (0.02, 0.4)
    )
    assert 0 < 20 * little.kl.mean() < much.kl.mean()
    assert much.kept.mean() < 1
    joined = Divergence.joined([same, much])
    assert joined.figures()["kl_mean"] == pytest.approx(much.kl.mean() / 2)
    assert len(joined.kl) == len(joined.kept) == 2 * POSITIONS


def test_only_full_attention() -> None:
    model = tiny_llama.make_model()
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(BenchError, match="full attention"):
        Subject(model, PREFIX, POSITIONS)


def test_levels_after_a_store_and_a_load(
    subject: Subject, tokens: list[int], tmp_path: Path
) -> None:
    """A lossless level costs nothing; at its bits CacheGen's scheme costs little."""
    steps: list[str] = []
    figures = quality.measure(
        subject, {"a": tokens, "b": tokens[::-1]}, tmp_path, steps.append, levels=("lossless",)
    )
    json.dumps(figures, allow_nan=False)
    assert len(steps) == 2 + 1 + 1 + len(cachegen.SCALINGS)
    assert "KL 0.000000" in steps[3]
    assert not list(tmp_path.iterdir())
    (row,) = figures["levels"]
    assert (row["level"], row["kl_mean"], row["kl_p99"], row["top1"]) == ("lossless", 0, 0, 1)
    assert row["kl_by_text"] == {"a": 0.0, "b": 0.0}
    assert row["bits_on_disk"] == figures["lossless_bits_on_disk"]
    assert row["bits_on_disk"] * 2 * 3 * 2 * 2 * PREFIX * 16 % (8 * 4096) == 0  # whole pages
    assert 0 < row["cachegen_kl"] < 1
    assert row["cachegen_bins"] in cachegen.SCALINGS


@pytest.fixture
def session(
    subject: Subject, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """flashkv-bench with the tiny model in place of the packaged one."""

    @contextmanager
    def given(settings, texts, step):
        yield subject, dict.fromkeys(texts, tokens)

    monkeypatch.setattr(quality_session, "_subject", given)
    return lambda *words: CliRunner().invoke(bench.app, [str(word) for word in words])


@pytest.mark.slow
def test_a_model_is_calibrated_and_measured(
    session: Callable[..., Result], subject: Subject, tmp_path: Path
) -> None:
    """From the command line: a profile of its own, and all levels with it."""
    profile, texts, out = tmp_path / "profile.json", tmp_path / "texts", tmp_path / "out.json"
    done = session("codec", "--calibrate", profile)
    assert done.exit_code == 0, done.output
    made = json.loads(profile.read_text())
    assert made["layers"] == 3
    assert set(made["levels"]) == {name for name in quality.LEVELS if name != "cold"}
    texts.mkdir()
    (texts / "a.txt").write_text("a text")
    (texts / "b.json").write_text('[{"q": "why?", "a": "because"}]')
    words = ("quality", "--texts", texts, "--path", tmp_path, "--json", out)
    done = session(*words, "--profile", profile)
    assert done.exit_code == 0, done.output
    figures = json.loads(out.read_text())
    assert figures["texts"] == ["a", "b"]
    assert [row["level"] for row in figures["levels"]] == list(quality.LEVELS)
    rows = {row["level"]: row for row in figures["levels"]}
    bits = [rows[f"bounded-{number}"]["bits_on_disk"] for number in (1, 2, 3, 4)]
    assert bits == sorted(bits, reverse=True)
    losses = [rows[level]["kl_mean"] for level in ("bounded-1", "bounded-2", "bounded-4")]
    assert 0 < 2 * losses[0] < losses[1] < losses[2]  # twice the step: about 4 times in theory
    assert all(row["cachegen_kl"] > 0 for row in figures["levels"])
    assert session(*words, "--profile", tmp_path / "absent").exit_code == 1
    assert session(*words, "--prefix", 100).exit_code == 1


def test_other_bytes_end_the_run(
    subject: Subject, tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*arguments: object) -> quality.Loaded:
        text = arguments[2]
        assert isinstance(text, quality.Text)
        return quality.Loaded(text.kv ^ np.uint16(1), 16.0)

    monkeypatch.setattr(quality, "through_store", damaged)
    with pytest.raises(BenchError, match="other bytes"):
        quality.measure(subject, {"a": tokens}, tmp_path, lambda _: None, levels=())


def test_profiles_are_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for content in ("", "[]", '{"model": "m", "layers": 3}'):
        path.write_text(content)
        with pytest.raises(BenchError, match="profile"):
            quality.read_profile(path)
    path.write_text('{"model": "m", "layers": 0, "levels": {}}')
    assert quality.read_profile(path)["model"] == "m"
    with pytest.raises(BenchError, match="no profile"):
        quality.read_profile(tmp_path / "absent")


# ---- CacheGen's scheme ---------------------------------------------------------------------------


def test_entropy_is_of_each_channel() -> None:
    symbols = np.zeros((2, 1, 64, 3), np.int32)
    assert cachegen.entropy_bits(symbols) == 0.0
    symbols[0, 0, :32, 0] = -7  # one bit a symbol
    symbols[1, 0, :, 2] = np.arange(64) % 4  # two
    symbols[:, 0, :, 1] = [[5], [-5]]  # of one layer each: none
    assert cachegen.entropy_bits(symbols) == pytest.approx(64 + 128)


def test_bins_bound_the_error_and_grow_over_the_layers() -> None:
    rng = np.random.default_rng(3)
    values = np.cumsum(rng.normal(size=(6, 2, 95, 8)), axis=2).astype(np.float32)
    for scaling in cachegen.SCALINGS:
        coarse, fine = (cachegen.code(values, scale, scaling) for scale in (1.0, 0.25))
        assert fine.bits > coarse.bits + values.size
        error = np.abs(coarse.values - values)
        error[:, :, :: cachegen.GROUP] = 0
        by_layer = error.mean(axis=(1, 2, 3)) / values.std(axis=(1, 2, 3))
        assert by_layer[:2].max() < by_layer[4:].min()
        anchors = np.abs(coarse.values - values)[:, :, :: cachegen.GROUP]
        assert anchors.max() <= np.abs(values).max() / 127 / 2 * 1.001
    with pytest.raises(ValueError, match="no scaling"):
        cachegen.code(values, 1.0, "layer")


def test_scales_are_found_for_bits() -> None:
    rng = np.random.default_rng(4)
    kv = np.cumsum(rng.normal(size=(3, 2, 2, 320, 16)), axis=3).astype(np.float32)
    for scaling in cachegen.SCALINGS:
        for wanted in (3.0, 4.5):
            scale = cachegen.scale_for(kv, wanted, scaling)
            assert cachegen.bits_a_value(kv, scale, scaling) == pytest.approx(wanted, abs=0.1)
    assert cachegen.scale_for(kv, 99.0, "channel") == cachegen.SCALES[0]
    assert cachegen.scale_for(kv, 0.01, "channel") == cachegen.SCALES[-1]
