"""The page of a training run, from what a run records."""

from pathlib import Path

import pytest
from page_studies import metrics_line, write_run

from tinyllm_ray.train.__main__ import main
from tinyllm_ray.tune.page.run_data import Stretch, run_data, stretches


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def test_a_runs_page_has_its_curves_its_result_and_its_start(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    page = (run / "report.html").read_text()
    for part in ("9.1000", "loss, nats a target", "throughput, targets/s", "gradient norm", "first update", "1,316"):
        assert part in page
    assert "<title>subset loss 9.6000 after 25.6 k tokens</title>" in page
    assert "&lt;b&gt;here" in page
    assert "<b>here" not in page
    assert "refresh" not in page


def test_a_run_that_has_only_begun_has_a_page_that_reloads(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"status": "running", "pid": 1, "host": "here"}')
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "No update yet" in page
    assert 'http-equiv="refresh"' in page


def test_a_long_curve_is_shown_by_means_and_ranges_that_lose_no_peak() -> None:
    metrics = [metrics_line(step, loss=float(step % 2)) for step in range(1, 1001)]
    metrics[500]["loss"] = 50.0
    points = stretches(metrics, "loss", most=100)
    assert len(points) == 100
    assert max(point.high for point in points) == 50.0
    assert points[0] == Stretch(tokens=5.5 * 512, mean=0.5, low=0.0, high=1.0)


def test_values_that_were_not_finite_leave_a_gap_and_each_model_of_a_pack_its_evaluations() -> None:
    metrics = [metrics_line(1), metrics_line(2, grad_norm=None), metrics_line(3, consensus_distance=0.1)]
    evaluations = [{"step": 3, "split": "validation", "loss": 9.0 + model, "model": model} for model in range(2)]
    page = run_data({"models": 2, "parameters": 2_000_000}, metrics, evaluations, {})
    assert len(page.curves["grad_norm"]) == 2
    assert len(page.curves["consensus_distance"]) == 1
    assert page.evaluations == {"validation 0": ((1536, 9.0),), "validation 1": ((1536, 10.0),)}
    assert page.title == "2.0M parameters, 2 models"


def test_a_folder_without_a_run_is_a_mistake_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: there is no run here (result.json is missing)\n"
