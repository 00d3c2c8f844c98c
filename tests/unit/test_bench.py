"""flashkv-bench: its arithmetic, how it reads fio, its JSON keys. Nothing here judges a speed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flashkv.tools import bench, bench_break_even, bench_io, fio, measure
from typer.testing import CliRunner

DATA = Path(__file__).resolve().parent.parent / "data"
needs_fio = pytest.mark.skipif(fio.fio_path() is None, reason="fio is not installed")

IO_KEYS = {
    "put_vs_fio_write",
    "get_vs_fio_read",
    "page_get_vs_fio_randread",
    "get_lossless_vs_fio_read",
    "cpu_s_per_gb",
    "control_us_per_batch",
    "control_us_per_block",
}


def test_spread_of_a_series():
    assert measure.spread([5.0, 1.0, 3.0, 2.0, 4.0]) == measure.Spread(3.0, 2.0, 4.0, 1.0, 5.0, 5)
    assert measure.spread([7.0]).as_dict() == {
        "median": 7.0, "q1": 7.0, "q3": 7.0, "min": 7.0, "max": 7.0, "count": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no samples"):
        measure.spread([])


def test_fit_line_finds_constant_and_slope():
    sizes = [1, 16, 256, 1024]
    constant, slope = measure.fit_line(sizes, [50 + 2 * size for size in sizes])
    assert constant == pytest.approx(50)
    assert slope == pytest.approx(2)
    # Costs that fall with the size are noise: no negative price.
    assert measure.fit_line([1, 2], [3.0, 1.0])[1] == 0
    assert measure.fit_line([1, 10], [1.0, 100.0])[0] == 0
    with pytest.raises(ValueError, match="different sizes"):
        measure.fit_line([4, 4], [1.0, 2.0])


def test_measurement_units():
    done = measure.Measurement(bytes=2 * 10**9, operations=500, seconds=4.0, cpu_s=1.0)
    assert (done.bytes_per_s, done.operations_per_s, done.cpu_s_per_gb) == (5e8, 125.0, 0.5)


def test_stopwatch_counts_processor_time_of_all_threads():
    with measure.stopwatch() as watch:
        before = measure.process_cpu_s()
        while measure.process_cpu_s() - before < 0.02:
            pass
    assert watch.cpu_s >= 0.02
    assert watch.measured(10, 1).seconds == watch.seconds > 0


def test_ratios_are_made_within_a_pair():
    samples = bench_io.Samples()
    for seconds in (1.0, 2.0):
        samples.add("put", measure.Measurement(100, 1, seconds, 0.1))
        samples.add("fio_write", measure.Measurement(200, 2, 2 * seconds, 0.1))
    assert samples.ratios("put_vs_fio_write") == [1.0, 1.0]


# ---- fio -----------------------------------------------------------------------------------------


def test_fio_output_is_read_behind_warnings():
    text = "fio: this platform is noisy\n" + (DATA / "fio_record_get.json").read_text()
    done = fio.measurement(fio.parse_output(text), "read")
    job = json.loads((DATA / "fio_record_get.json").read_text())["jobs"][0]
    assert (done.bytes, done.operations, done.seconds) == (4 << 20, 4, job["read"]["runtime"] / 1e3)
    assert done.cpu_s == pytest.approx(
        (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    )


@pytest.mark.parametrize("text", ["", "no such engine", "{broken", "[]", '{"jobs": []}'])
def test_fio_output_that_is_none(text):
    with pytest.raises(fio.FioError, match="no JSON"):
        fio.parse_output(text)


def test_fio_jobs_that_failed_or_did_nothing():
    output = fio.parse_output((DATA / "fio_record_get.json").read_text())
    with pytest.raises(fio.FioError, match="did no write"):
        fio.measurement(output, "write")
    output["jobs"][0]["error"] = 28
    with pytest.raises(fio.FioError, match="errno 28"):
        fio.measurement(output, "read")


def test_every_profile_is_well_formed_and_can_be_overridden():
    names = sorted(path.stem for path in fio.PROFILES.glob("*.fio"))
    assert names == [
        "endurance_write", "mixed", "page_get", "record_get", "recovery_scan", "segment_append",
    ]  # fmt: skip
    for name in names:
        assert "\nsize=1M\n" in fio.job_text(name, {"size": "1M"})
    assert fio.job_text("mixed", {"size": "1M"}).count("\nsize=1M\n") == 2
    with pytest.raises(fio.FioError, match="known: endurance_write"):
        fio.load_profile("nothing")


@needs_fio
def test_fio_says_what_was_wrong(tmp_path):
    with pytest.raises(fio.FioError, match="ended with"):
        fio.run_profile("record_get", tmp_path, "read", {"ioengine": "no_such_engine"})


# ---- the commands --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def io_figures(tmp_path_factory):
    """A real run, as small as can be, and the folder that it ran in."""
    folder = tmp_path_factory.mktemp("bench")
    settings = bench_io.IoSettings(folder, size_bytes=8 << 20, pairs=2)
    steps: list[str] = []
    figures = bench_io.run_io(settings, steps.append)
    assert len(steps) == bench_io.io_steps(settings)
    return figures, folder


@needs_fio
def test_io_figures(io_figures):
    figures, folder = io_figures
    assert figures.keys() >= IO_KEYS | {"spread", "samples", "machine", "store", "settings"}
    for key in bench_io.RATIOS:
        around = figures["spread"][key]
        assert figures[key] == around["median"]
        assert 0 < around["min"] <= around["median"] <= around["max"]
        assert around["count"] == 2
    sides = {side for pair in bench_io.RATIOS.values() for side in pair}
    assert figures["cpu_s_per_gb"].keys() >= sides
    assert all(len(figures["samples"][side]) == 2 for side in sides)
    assert figures["store"]["backend"] in {"io_uring", "threads"}
    assert figures["store"]["real_kv_compression_ratio"] > 1.2
    assert list(folder.iterdir()) == []  # nothing is left behind


@needs_fio
def test_io_command_writes_the_figures(io_figures, tmp_path, monkeypatch):
    asked: list[bench_io.IoSettings] = []

    def run_io(settings, _step):
        asked.append(settings)
        return io_figures[0]

    monkeypatch.setattr(bench, "run_io", run_io)
    file = tmp_path / "io.json"
    arguments = ["io", "--size", "2GiB", "--pairs", "20", "--path", str(tmp_path)]
    result = CliRunner().invoke(bench.app, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert asked == [bench_io.IoSettings(tmp_path, 2 << 30, 20)]
    assert json.loads(file.read_text()) == io_figures[0]
    assert "page_get_vs_fio_randread" in result.output


def test_open_json_keys(tmp_path):
    file = tmp_path / "open.json"
    arguments = ["open", "--blocks", "5000", "--path", str(tmp_path), "--json", str(file)]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    assert figures.keys() >= {"blocks", "open_s", "index_bytes_per_block", "contains_one_us"}
    assert figures["blocks"] == 5000
    assert len(figures["samples"]["open_s"]) == figures["spread"]["open_s"]["count"]
    assert [path.name for path in tmp_path.iterdir()] == ["open.json"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["io", "--size", "1MiB"], "--size"),
        (["io", "--size", "many"], "--size"),
        (["io", "--backend", "aio"], "io_uring"),
        (["open", "--backend", "aio"], "io_uring"),
        (["io", "--pairs", "4"], "--pairs"),
        (["io", "--path", "/nowhere"], "--path"),
    ],
)
def test_bad_arguments(arguments, word, monkeypatch):
    monkeypatch.setattr(bench, "fio_path", lambda: "/bin/fio")
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code != 0
    assert word in result.output


def test_io_without_fio(monkeypatch):
    monkeypatch.setattr(bench, "fio_path", lambda: None)
    result = CliRunner().invoke(bench.app, ["io"])
    assert result.exit_code == 1
    assert "apt-get install fio" in result.output


def test_ttft_json_keys(tmp_path):
    pytest.importorskip("transformers")
    from tiny_llama import make_model

    make_model().save_pretrained(tmp_path / "model")
    arguments = ["ttft", "--model", str(tmp_path / "model"), "--tokens", "200,70", "--passes", "2"]
    arguments += ["--no-break-even", "--threads", "1", "--path", str(tmp_path)]
    arguments += ["--engine", "transformers"]
    done = CliRunner().invoke(bench.app, [*arguments, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "out.json").read_text())
    assert list(figures["ttft_s"]["transformers"]) == ["200", "70"]
    for tokens in ("200", "70"):
        assert set(figures["ttft_s"]["transformers"][tokens]) == {
            "computed",
            "flashkv",
            "host memory",
        }
        assert len(figures["ttft_samples_s"]["transformers"][tokens]["flashkv"]) == 2
        assert figures["flashkv_to_host_memory"]["transformers"][tokens]["flashkv"]["median"] > 0
    assert set(figures["left_out"]) == {"vllm", "sglang", "lmcache"}
    assert [item.name for item in tmp_path.iterdir() if item.is_dir()] == ["model"]


@pytest.mark.parametrize("tokens", ["", "many", "1", "100,100"])
def test_ttft_lengths_that_are_none(tokens, tmp_path):
    done = CliRunner().invoke(bench.app, ["ttft", "--tokens", tokens, "--path", str(tmp_path)])
    assert done.exit_code == 1


def test_blocks_of_real_numbers_have_every_geometrys_shape():
    for geometry in bench_break_even.GEOMETRIES.values():
        blocks = bench_break_even.blocks_of(geometry)
        assert blocks.shape[1] == geometry.block_bytes(0, 64)
        assert len(blocks) >= 2
        values = blocks.view(np.uint16)
        assert len(np.unique(values[0])) > 1000
        assert not np.array_equal(blocks[0], blocks[1])
