"""Loaders refuse, log and deliver what they did when it was recorded; ``record.py`` says how to record again."""

from __future__ import annotations

import json
from pathlib import Path

import audits
import of_one
import pairs
import pytest
import record
import torch
from data import make_data

SEED = 7

pytestmark = pytest.mark.filterwarnings("ignore::penstock.loader.BadSampleWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("RANK", raising=False)
        with pytest.warns(record.BadSampleWarning):
            return make_data(tmp_path_factory.mktemp("recordings") / "data")


def compare(data: Path, scratch: Path, name: str, chosen: list[tuple[pairs.Key, pairs.Key]]) -> None:
    family = pairs.FAMILIES[name]
    recording = pairs.Recording(**record.read_refusals(name))
    if torch.cuda.is_available():
        chosen = [pair for pair in chosen if ("device", "cuda") not in pair]
    found = list(pairs.differences(pairs.Bench(data, scratch), family, recording, chosen))
    assert not found, "\n".join(f"{pair}\n  was {was}\n  is  {now}" for pair, was, now in found[:20])


@pytest.mark.slow
@pytest.mark.parametrize("family", pairs.FAMILIES)
def test_a_fortieth_of_the_pairs_of_arguments_is_refused_in_the_recorded_words(
    data: Path, tmp_path: Path, family: str
) -> None:
    compare(data, tmp_path, family, pairs.some_pairs(pairs.FAMILIES[family], SEED))


@pytest.mark.full
@pytest.mark.parametrize("family", pairs.FAMILIES)
def test_all_pairs_of_arguments_are_refused_in_the_recorded_words(data: Path, tmp_path: Path, family: str) -> None:
    compare(data, tmp_path, family, list(pairs.pairs_of(pairs.FAMILIES[family])))


@pytest.mark.parametrize("family", pairs.FAMILIES)
def test_each_value_of_an_argument_is_recorded(family: str) -> None:
    recorded = record.read_refusals(family)
    assert list(recorded["alone"]) == [pairs.name_of(key) for key in pairs.keys_of(pairs.FAMILIES[family])]


@pytest.mark.parametrize("world_size", audits.WORLDS)
@pytest.mark.parametrize("kind", audits.KINDS)
def test_the_audits_logs_hold_what_is_recorded(data: Path, tmp_path: Path, kind: str, world_size: int) -> None:
    found = audits.record(data, tmp_path, kind, world_size)
    assert json.loads(json.dumps(found)) == record.read("audits")[kind][f"{world_size} ranks"]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", of_one.KINDS)
def test_a_mixture_of_one_is_like_its_data_set_alone_where_it_is_recorded(data: Path, kind: str) -> None:
    assert of_one.record(data, kind) == record.read("mixture_of_one")[kind]
