"""Routing by embedding: centroids and their search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from methods.routing import CentroidIndex, pack_vector, unpack_vector


def test_centroids_are_running_means_and_the_search_is_exact() -> None:
    chance = np.random.default_rng(1)
    vectors = chance.normal(size=(60, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = CentroidIndex(8)
    assert index.nearest(vectors[0]) is None
    members: list[list[Any]] = []
    for at, vector in enumerate(vectors):
        if at < 20:
            assert index.add(vector) == at
            members.append([vector])
        else:
            index.update(at % 20, vector)
            members[at % 20].append(vector)
    means = np.array([np.mean(own, axis=0) for own in members])
    expected = means @ vectors[3] / np.linalg.norm(means, axis=1)
    found = index.nearest(vectors[3])
    assert found is not None and found[0] == int(expected.argmax())
    assert index.scores(vectors[3]) == pytest.approx(expected, abs=1e-5)
    assert [index.count(row) for row in (0, 19)] == [3, 3] and len(index) == 20
    again = CentroidIndex(8)
    for row in range(20):
        again.restore(index.total(row), index.count(row))
    assert (again.scores(vectors[5]) == index.scores(vectors[5])).all()


def test_vectors_survive_packing_to_the_bit() -> None:
    vector = np.array([1e-30, -0.1, 3.4e38], dtype=np.float32)
    assert (unpack_vector(pack_vector(vector)) == vector).all()
    with pytest.raises(ValueError):
        unpack_vector("no base64!")


def test_the_search_can_be_kept_to_some_rows() -> None:
    index = CentroidIndex(2)
    for vector in ([1, 0], [0.6, 0.8], [0, 1]):
        index.add(np.array(vector, dtype=np.float32))
    probe = np.array([1, 0], dtype=np.float32)
    assert index.nearest(probe) == (0, 1.0)
    assert index.nearest(probe, [2, 1]) == (1, pytest.approx(0.6))
    assert index.nearest(probe, [2]) == (2, 0.0)
    assert index.nearest(probe, []) is None


def test_what_is_no_vector_is_refused() -> None:
    with pytest.raises(ValueError):
        unpack_vector("AAA=")  # two bytes
    with pytest.raises(ValueError):
        CentroidIndex(3).add(np.ones(2, dtype=np.float32))
