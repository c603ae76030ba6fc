from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from penstock.loader.errors import ConfigError, StateMismatchError
from penstock.loader.order.plan import Order
from penstock.loader.order.state import LoaderState

STATE = LoaderState(
    fingerprint="ab" * 16, num_samples=1000, seed=7, shuffle=True, lanes=16, window=4, epoch=3, consumed=640
)


def test_a_state_survives_json():
    assert LoaderState.from_dict(json.loads(json.dumps(STATE.to_dict()))) == STATE
    assert len(json.dumps(STATE.to_dict())) < 300


def test_a_state_without_pieces_is_what_it_was_before_there_were_any():
    assert STATE.to_dict() == {
        "fingerprint": "ab" * 16,
        "num_samples": 1000,
        "seed": 7,
        "shuffle": True,
        "lanes": 16,
        "window": 4,
        "epoch": 3,
        "consumed": 640,
        "version": 1,
        "checksum": "e4c5382101e7d051",
    }
    assert LoaderState.from_dict(STATE.to_dict()).order.piece == 0


def test_a_state_with_pieces_is_refused_by_who_knows_none():
    state = replace(STATE, piece=1).to_dict()
    assert state["version"] == 2
    assert LoaderState.from_dict(json.loads(json.dumps(state))).order.piece == 1
    with pytest.raises(StateMismatchError, match="missing: piece"):
        LoaderState.from_dict({name: value for name, value in state.items() if name != "piece"})
    with pytest.raises(StateMismatchError, match=r"damaged.*piece"):
        LoaderState.from_dict({**state, "piece": -1})


def test_a_state_with_numpys_numbers_in_its_order_survives_json_too():
    order = Order(seed=np.int64(7), shuffle=np.bool_(True), lanes=np.int32(16), window=np.int64(4))  # type: ignore[arg-type]
    state = replace(STATE, seed=order.seed, shuffle=order.shuffle, lanes=order.lanes, window=order.window)
    assert LoaderState.from_dict(json.loads(json.dumps(state.to_dict()))) == STATE


@pytest.mark.parametrize("wrong", [{"seed": 1.5}, {"seed": "1"}, {"lanes": 16.0}, {"window": None}])
def test_an_order_of_other_than_whole_numbers_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name}=.*whole number"):
        replace(Order(), **wrong)


def test_a_state_that_was_saved_before_there_were_checksums_is_read():
    old = {name: value for name, value in STATE.to_dict().items() if name != "checksum"}
    assert LoaderState.from_dict({**old, "consumed": 641}) == replace(STATE, consumed=641)


@pytest.mark.parametrize(
    "change", [{"epoch": 2}, {"consumed": 641}, {"fingerprint": "ba" * 16}, {"checksum": "0" * 16}, {"checksum": None}]
)
def test_a_state_that_was_changed_is_refused_by_its_checksum(change):
    with pytest.raises(StateMismatchError, match=r"checksum is .*penstock state skip"):
        LoaderState.from_dict({**STATE.to_dict(), **change})


def test_fields_of_a_later_kind_are_passed_over():
    assert LoaderState.from_dict({**STATE.to_dict(), "cursors": [1, 2]}) == STATE


@pytest.mark.parametrize("state", [{}, {"version": 3}, {"version": "1"}])
def test_what_is_no_state_of_this_version_is_refused(state):
    with pytest.raises(StateMismatchError, match="version"):
        LoaderState.from_dict(state)


@pytest.mark.parametrize("state", [None, [], "x"])
def test_what_is_no_dict_is_refused_by_its_type(state):
    with pytest.raises(StateMismatchError, match=f"is a dict, not {type(state).__name__}"):
        LoaderState.from_dict(state)


@pytest.mark.parametrize("name", [name for name in STATE.to_dict() if name != "checksum"])
def test_a_field_that_is_missing_is_named(name):
    lacking = {key: value for key, value in STATE.to_dict().items() if key != name}
    with pytest.raises(StateMismatchError, match=f"missing: {name};"):
        LoaderState.from_dict(lacking)


@pytest.mark.parametrize("name", [name for name in STATE.to_dict() if name not in ("version", "checksum")])
def test_a_field_of_a_wrong_type_is_named(name):
    for wrong in (None, 1.5):
        damaged = {**STATE.to_dict(), name: wrong}
        with pytest.raises(StateMismatchError, match=f"damaged.*{name}"):
            LoaderState.from_dict(damaged)


@pytest.mark.parametrize("wrong", [{"epoch": -1}, {"consumed": -1}, {"consumed": 1001}])
def test_a_position_outside_the_data_set_is_refused(wrong):
    with pytest.raises(StateMismatchError, match="damaged"):
        LoaderState.from_dict({**STATE.to_dict(), **wrong})


def test_everything_that_differs_is_named_with_both_values():
    with pytest.raises(StateMismatchError) as refused:
        STATE.check(fingerprint="cd" * 16, num_samples=1000, seed=8, shuffle=True, lanes=None, window=2)
    message = str(refused.value)
    for part in ("data set (fingerprint)", "cd" * 16, "seed: 7 in the state, 8 here", "window: 4 in the state, 2 here"):
        assert part in message
    assert "lanes" not in message
    assert "samples" not in message
    STATE.check(fingerprint="ab" * 16, num_samples=1000, seed=7, shuffle=True, lanes=16, window=None)
