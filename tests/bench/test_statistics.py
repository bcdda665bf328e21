from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from bench.statistics import (
    Estimate,
    bootstrap_mean,
    format_estimate,
    format_p,
    holm,
    mcnemar,
    order_statistic_ranks,
    paired_difference,
    paired_ratio,
    quantile,
    wilson,
)


@pytest.mark.parametrize(("k", "n"), [(0, 5), (1, 1), (37, 50), (50, 50), (999, 1000)])
def test_wilson_agrees_with_scipy(k: int, n: int) -> None:
    expected = stats.binomtest(k, n).proportion_ci(method="wilson")
    found = wilson(k, n)
    assert found is not None and found.low is not None and found.high is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_edges() -> None:
    assert wilson(0, 0) is None
    with pytest.raises(ValueError, match="6 successes of 5"):
        wilson(6, 5)
    assert wilson(2.5, 5) is not None


@pytest.mark.parametrize(("p", "least"), [(0.5, 6), (0.9, 29), (0.99, 299)])
def test_a_quantile_needs_a_sample_that_can_bracket_it(p: float, least: int) -> None:
    assert order_statistic_ranks(least - 1, p) is None
    ranks = order_statistic_ranks(least, p)
    assert ranks is not None and ranks[1] == least
    assert quantile(range(least - 1), p) is None


@pytest.mark.parametrize(("n", "p"), [(50, 0.5), (100, 0.9), (1000, 0.99), (7, 0.5)])
def test_ranks_cover_and_are_the_narrowest(n: int, p: float) -> None:
    ranks = order_statistic_ranks(n, p)
    assert ranks is not None

    def coverage(low: int, high: int) -> float:
        return float(stats.binom.cdf(high - 1, n, p) - stats.binom.cdf(low - 1, n, p))

    width = ranks[1] - ranks[0]
    assert coverage(*ranks) >= 0.95
    assert all(coverage(low, low + width - 1) < 0.95 for low in range(1, n - width + 2))


def test_quantile_points_and_errors() -> None:
    found = quantile(np.arange(1, 102), 0.5)
    assert found is not None and found.value == 51 and found.n == 101
    with pytest.raises(ValueError, match="between 0 and 1"):
        order_statistic_ranks(10, 1.0)


def test_mcnemar_agrees_with_the_binomial_test() -> None:
    ours = [True] * 9 + [False] * 2 + [True] * 30
    base = [False] * 9 + [True] * 2 + [True] * 30
    assert mcnemar(ours, base) == pytest.approx(stats.binomtest(2, 11).pvalue)
    assert mcnemar([True], [True]) == 1.0
    assert mcnemar([], []) is None
    with pytest.raises(ValueError, match="1 values against 2"):
        mcnemar([True], [True, False])


def test_holm() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == [
        pytest.approx(0.03),
        None,
        pytest.approx(0.06),
        pytest.approx(0.06),
    ]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_bootstrap_is_deterministic_and_near_the_t_interval() -> None:
    values = np.random.default_rng(3).normal(5, 2, 40)
    first, again = bootstrap_mean(values), bootstrap_mean(values)
    assert first == again and first is not None and first.low is not None and first.high is not None
    low, high = stats.t.interval(0.95, 39, values.mean(), stats.sem(values))
    assert (first.low, first.high) == pytest.approx((low, high), abs=0.1)
    assert bootstrap_mean([]) is None
    assert bootstrap_mean([3.0]) == Estimate(3.0, None, None, 1)


def test_clusters_widen_and_one_cluster_has_no_interval() -> None:
    ours = [1.0] * 20 + [0.0] * 20
    base = [0.0] * 20 + [0.0] * 20
    labels = [f"g{i // 10}" for i in range(40)]
    loose, clustered = paired_difference(ours, base), paired_difference(ours, base, labels)
    assert loose is not None and clustered is not None
    assert loose.low is not None and clustered.low is not None and clustered.low < loose.low
    alone = paired_difference(ours, base, ["g"] * 40)
    assert alone is not None and (alone.low, alone.high) == (None, None)


def test_clusters_that_agree_by_chance_do_not_narrow_the_interval() -> None:
    ours, base = [0.0, 1.0, 1.0, 1.0] * 5, [1.0] * 20
    loose = paired_difference(ours, base)
    assert paired_difference(ours, base, [f"g{i // 4}" for i in range(20)]) == loose
    assert loose is not None and loose.low is not None and loose.low < -0.25


def test_agreeing_pairs_prove_little() -> None:
    same = paired_difference([1.0] * 10, [1.0] * 10)
    assert same is not None and same.low is not None
    assert same.low == pytest.approx(-(1 - 0.025**0.1)) and not same.excludes(0)
    worst = paired_difference([0.0] * 10, [1.0] * 10)
    assert worst is not None and worst.low == -1 and worst.high is not None and worst.high > -0.8


def test_paired_ratio() -> None:
    found = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found is not None and (found.value, found.low, found.high) == (2.0, 2.0, 2.0)
    assert paired_ratio([], []) is None
    assert paired_ratio([1.0, 1.0], [0.0, 0.0]) is None
    with pytest.raises(ValueError, match="1 values against 2"):
        paired_ratio([1.0], [1.0, 2.0])


def _covers(found: Estimate | None, truth: float) -> bool:
    return (
        found is not None
        and found.low is not None
        and found.high is not None
        and found.low <= truth <= found.high
    )


def test_coverage_by_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.statistics.RESAMPLES", 2_000)
    rng = np.random.default_rng(11)
    trials = 200
    held = dict.fromkeys(("wilson", "median", "mean", "clustered", "ratio"), 0)
    groups = np.repeat(np.arange(8), 6)
    for _ in range(trials):
        held["wilson"] += _covers(wilson(int(rng.binomial(30, 0.8)), 30), 0.8)
        held["median"] += _covers(quantile(rng.exponential(size=25), 0.5), float(np.log(2)))
        held["mean"] += _covers(bootstrap_mean(rng.normal(1, 1, 20)), 1.0)
        effect = rng.normal(0, 0.2, 8)[groups] + rng.normal(0, 0.1, 48)
        held["clustered"] += _covers(paired_difference(effect, np.zeros(48), groups.tolist()), 0.0)
        base = rng.lognormal(0, 0.3, 30)
        held["ratio"] += _covers(paired_ratio(base * 2 * rng.lognormal(-0.02, 0.2, 30), base), 2.0)
    assert all(count / trials >= 0.90 for count in held.values()), held


def test_formats() -> None:
    assert format_estimate(Estimate(0.74, 0.604, 0.841, 50), scale=100) == "74.0 [60.4–84.1]"
    assert format_estimate(Estimate(-0.12, -0.2, 0.04, 50), scale=100, sign=True) == "−12.0 [−20.0, +4.0]"
    assert format_estimate(Estimate(-0.00001, -0.1, 0.1, 5), sign=True) == "0.0 [−0.1, +0.1]"
    assert format_estimate(Estimate(1.0, None, None, 1), decimals=2) == "1.00 [n/a]"
    assert format_estimate(None) == "n/a"
    assert [format_p(p) for p in (None, 0.0001, 0.0321, 0.5)] == ["n/a", "< 0.001", "0.032", "0.50"]


def test_importing_the_statistics_does_not_import_scipy() -> None:
    import subprocess
    import sys

    code = "import sys, bench.metrics; sys.exit(bool({'scipy', 'pandas', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
