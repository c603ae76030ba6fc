"""A sample's generator depends on (seed, epoch, sample id) and on nothing else."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.order.permutation import sample_rng

WORDS = st.integers(0, 2**64 - 1)


def test_golden_values_do_not_change():
    rng = sample_rng(1, 2, 3)
    assert rng.random(3).tolist() == [0.0925885790718205, 0.4149406683860519, 0.42431388358289956]
    assert rng.integers(1000, size=4).tolist() == [857, 203, 980, 495]
    assert sample_rng(0, 0, 0).bit_generator.random_raw() == 213000021201967259


@given(WORDS, WORDS, WORDS)
def test_it_is_philox_with_the_key_and_counter_that_are_documented(seed, epoch, sample_id):
    documented = np.random.Philox(
        key=np.array([seed, sample_id], np.uint64), counter=np.array([0, 0, 0, epoch], np.uint64)
    )
    assert sample_rng(seed, epoch, sample_id).bit_generator.random_raw(9).tolist() == documented.random_raw(9).tolist()


def test_each_purpose_has_a_stream_of_its_own_and_the_first_is_the_default() -> None:
    drawn = np.array([sample_rng(1, 2, 3, purpose).random(4000) for purpose in range(3)])
    assert drawn[0].tolist() == sample_rng(1, 2, 3).random(4000).tolist()
    assert len(np.unique(drawn)) == drawn.size
    assert abs(np.corrcoef(drawn)[np.triu_indices(3, 1)]).max() < 0.06


def test_neighbouring_triples_share_no_number():
    drawn = [sample_rng(*triple).random(8) for triple in itertools.product(range(8), repeat=3)]
    assert len(np.unique(np.concatenate(drawn))) == 8 * 8**3


def test_first_draws_of_consecutive_samples_are_uniform_and_uncorrelated():
    first = np.array([sample_rng(0, 0, sample_id).random(2) for sample_id in range(4000)])
    assert abs(first.mean() - 0.5) < 0.02
    assert abs(first.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(first[:-1, 0], first[1:, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(first[:, 0], first[:, 1])[0, 1]) < 0.06


def test_generators_share_no_state():
    one, other = sample_rng(5, 0, 1), sample_rng(5, 0, 2)
    expected = sample_rng(5, 0, 2).random(4).tolist()
    one.random(1000)
    assert other.random(4).tolist() == expected


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda rng: pickle.loads(pickle.dumps(rng))])
def test_a_copy_continues_where_the_original_is(clone):
    rng = sample_rng(7, 8, 9)
    rng.random(5)
    assert clone(rng).random(4).tolist() == rng.random(4).tolist()


def test_negative_and_large_numbers_count_modulo_two_to_the_64():
    assert sample_rng(-1, 0, 2**64 + 5).random() == sample_rng(2**64 - 1, 0, 5).random()


def test_numpy_integers_are_as_good_as_ints():
    assert sample_rng(0, 1, np.int64(77)).random() == sample_rng(0, 1, 77).random()


def test_making_one_reads_no_entropy_of_the_system() -> None:
    assert not isinstance(sample_rng(0, 0, 0).bit_generator.seed_seq, np.random.SeedSequence)
