"""Streaming metrics against the textbook formulas, batch by batch, merged and resumed."""

from __future__ import annotations

import math

import pytest
import torch

from gem_model.metrics import AUC, Calibration, Metric, NormalizedEntropy

TASKS = ("click", "conversion")
METRICS = [NormalizedEntropy, AUC, Calibration]


def samples(count: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits on a grid of eighths, so that many are tied, and labels that follow them."""
    logits = (torch.randn(count, 2) * 16).round() / 8
    return logits, (torch.rand(count, 2) < logits.sigmoid()).float()


def naive(kind: type[Metric], logits: list[float], labels: list[float]) -> float:
    p = [1 / (1 + math.exp(-x)) for x in logits]
    if kind is Calibration:
        return math.fsum(p) / math.fsum(labels)
    if kind is NormalizedEntropy:
        loss = -math.fsum(math.log2(q) if y else math.log2(1 - q) for q, y in zip(p, labels, strict=True))
        positives, n = math.fsum(labels), len(labels)
        rate = positives / n
        return loss / -(positives * math.log2(rate) + (n - positives) * math.log2(1 - rate))
    pairs = [
        (a, b) for a, y in zip(logits, labels, strict=True) if y for b, z in zip(logits, labels, strict=True) if not z
    ]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def fed(kind: type[Metric], logits: torch.Tensor, labels: torch.Tensor, size: int) -> Metric:
    metric = kind(TASKS)
    for part, label in zip(logits.split(size), labels.split(size), strict=True):
        metric.update(part, label)
    return metric


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("size", [1, 64, 400])
def test_value_is_the_textbook_formula_however_it_is_batched(kind, size):
    logits, labels = samples()
    value = fed(kind, logits, labels, size).compute()
    for at, task in enumerate(TASKS):
        expected = naive(kind, logits[:, at].tolist(), labels[:, at].tolist())
        assert value[task] == pytest.approx(expected, rel=400 * 2.0**-50)  # float64 sums of 400 terms


@pytest.mark.parametrize("kind", METRICS)
def test_merge_and_resume_equal_one_pass(kind):
    logits, labels = samples()
    whole = fed(kind, logits, labels, 100)
    first, second = fed(kind, logits[:200], labels[:200], 100), fed(kind, logits[200:], labels[200:], 100)
    resumed = kind(TASKS)
    resumed.load_state_dict(first.state_dict())
    for at in (200, 300):
        resumed.update(logits[at : at + 100], labels[at : at + 100])
    assert resumed.compute() == whole.compute()
    assert first.merge([second]).compute() == pytest.approx(whole.compute(), rel=2.0**-48)
    assert first.samples == 400
    assert second.samples == 200


def test_known_values():
    even = torch.tensor([[0.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    ne, auc, calibration = NormalizedEntropy(["t"]), AUC(["t"]), Calibration(["t"])
    for metric in (ne, auc, calibration):
        metric.update(*even)
    assert (ne.compute(), auc.compute(), calibration.compute()) == ({"t": 1.0}, {"t": 0.5}, {"t": 1.0})
    base = torch.full((1000,), math.log(0.3 / 0.7))
    ne = NormalizedEntropy(["t"])
    ne.update(base, (torch.arange(1000) < 300).float())
    assert ne.compute()["t"] == pytest.approx(1.0, rel=1e-7)  # the logit is fp32
    perfect = AUC(["t"])
    perfect.update(torch.arange(10.0), (torch.arange(10) > 6).float())
    assert perfect.compute() == {"t": 1.0}


def test_far_logits_stay_finite_and_exact():
    ne = NormalizedEntropy(["t"])
    ne.update(torch.tensor([1000.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert ne.compute()["t"] == pytest.approx((1000 + math.log(2)) / 2 / math.log(2), rel=1e-12)


@pytest.mark.parametrize("kind", METRICS)
def test_bad_values_name_the_sample_and_task_and_add_nothing(kind):
    logits, labels = samples()
    metric = fed(kind, logits, labels, 100)
    before = metric.compute()
    bad = logits[:10].clone()
    bad[7, 1] = torch.nan
    with pytest.raises(ValueError, match=r"logit of sample 7 of this update \(407 in all\), task 'conversion', is nan"):
        metric.update(bad, labels[:10])
    wrong = labels[:10].clone()
    wrong[3, 0] = 0.5
    with pytest.raises(ValueError, match=r"label of sample 3 .* task 'click', is 0.5: it must be 0 or 1"):
        metric.update(logits[:10], wrong)
    with pytest.raises(ValueError, match=r"logits \(10, 1\) and labels \(10, 2\) must both be \[B, 2\]"):
        metric.update(logits[:10, :1], labels[:10])
    assert metric.compute() == before
    assert metric.samples == 400


def test_undefined_values_are_errors():
    for kind, message in (
        (NormalizedEntropy, "all 3 labels are 0"),
        (AUC, "0 positive and 3 negative"),
        (Calibration, "no label is 1"),
    ):
        metric = kind(["t"])
        with pytest.raises(ValueError, match="has no samples"):
            metric.compute()
        metric.update(torch.zeros(3), torch.zeros(3))
        with pytest.raises(ValueError, match=message):
            metric.compute()


def test_states_and_merges_of_other_metrics_are_refused():
    with pytest.raises(ValueError, match="the state has keys"):
        AUC(TASKS).load_state_dict(Calibration(TASKS).state_dict())
    with pytest.raises(ValueError, match=r"tasks \('t',\)"):
        AUC(TASKS).load_state_dict(AUC(["t"]).state_dict())
    with pytest.raises(ValueError, match="cannot merge"):
        AUC(TASKS).merge([AUC(["t"])])
    with pytest.raises(ValueError, match="at least one task"):
        AUC([])
