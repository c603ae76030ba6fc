"""The click model: the area under its ROC curve is the one that everybody means, and its tables may lie on servers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from penstock.trainer.recipes.clicks import CATEGORIES, ClickNet, count_ordered, measure


@pytest.mark.parametrize("levels", [3, 1000])
def test_the_area_under_the_curve_is_that_of_scikit_learn(levels: int) -> None:
    draws = np.random.default_rng(levels)
    click = draws.random(500) < 0.3
    logits = torch.from_numpy(draws.integers(0, levels, 500) / levels + 0.2 * click)
    ordered, pairs = count_ordered(logits[click], logits[~click])
    assert float(ordered / pairs) == pytest.approx(roc_auc_score(click, logits), abs=1e-12)


def test_a_batch_without_clicks_has_no_pairs() -> None:
    ordered, pairs = count_ordered(torch.zeros(0), torch.ones(4))
    assert (float(ordered), float(pairs)) == (0, 0)


def make_batch(rows: int = 40) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    batch = {f"category_{i}": torch.randint(0, 50, (rows,), generator=draws, dtype=torch.int32) for i in range(8)}
    batch |= {f"number_{i}": torch.randn(rows, generator=draws) for i in range(4)}
    return batch | {"click": torch.randint(0, 2, (rows,), generator=draws, dtype=torch.int8)}


def test_metrics_leave_padding_out() -> None:
    batch = make_batch()
    model = ClickNet(values=50)
    valid = torch.arange(40) < 30
    with torch.no_grad():
        padded = measure(model, {**batch, "__valid__": valid})
        cut = measure(model, {name: field[:30] for name, field in batch.items()})
    assert {name: [float(one) for one in pair] for name, pair in padded.items()} == {
        name: pytest.approx([float(one) for one in pair]) for name, pair in cut.items()
    }


def test_a_served_model_asks_for_the_rows_of_a_batch_and_has_no_tables_of_its_own() -> None:
    batch = make_batch()
    served = ClickNet(served=True)
    assert set(served.lookups(batch)) == {f"category_{i}" for i in range(CATEGORIES)}
    assert ClickNet().lookups(batch) == {}
    assert not any("embeddings" in name for name, _ in served.named_parameters())
