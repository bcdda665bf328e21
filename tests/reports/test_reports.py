from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.metrics import NS
from bench.records import CacheRecord, Record, Times
from reports.details import cell_details, command, examples
from reports.findings import findings
from reports.page import render_page, write_index, write_report
from reports.plots import looks, render
from reports.summary import display_name, source_label, summarize
from reports.tables import csv_table, latex_table, main_columns, markdown, paper_columns, plain, show
from reports.verdict import verdict
from tests.synthetic import beside, grade, record, run_of

SIX = ("direct", "pot", "exactcache", "gptcache", "gencache", "minicache")
HOSTILE = (
    "</pre><script>alert(1)</script>\u202egnp.exe\x00 | `x` \\ $\\alpha$ & 100% _ {} 漢字 😀 "
    "<img src=//evil.example>"
)


def change(records: list[Record], cell: str, index: int, **changes: Any) -> list[Record]:
    return [r.model_copy(update=changes) if r.cell == cell and r.index == index else r for r in records]


def problems(run: dict[str, Any], records: list[Record]) -> str:
    return " ".join(f"{r['problem']} {r['remedy']}" for r in verdict(run, records)["reasons"])


def test_a_whole_run_is_valid() -> None:
    assert verdict(*run_of(n=10)) == {"valid": True, "reasons": []}


def test_an_unfinished_run_names_its_resume() -> None:
    run, records = run_of(n=10)
    found = problems(run, records[:-3])
    assert "formula+exactcache 7 of 10" in found and f"reusebench resume {run['id']}" in found
    assert "10 of 10" not in found


def test_low_coverage_names_the_failure() -> None:
    run, records = run_of(n=10)
    failed = record("formula+pot", 3, outcome="infra_error")
    records = [failed if r.cell == "formula+pot" and r.index == 3 else r for r in records]
    found = problems(run, records)
    assert "90.0%" in found and "infra_error: connection refused" in found
    again = [*records, failed.model_copy(update={"attempt": 2, "outcome": "ok", "grade": grade(1.0)})]
    assert verdict(run, again)["valid"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schema_version": 99}, "schema 99"),
        ({"status": "failed"}, "stopped with an error"),
        ({"engines": {"target": {"restarts": 2}, "small": None}}, "restarted 2 time"),
        (
            {"workloads": {"formula": {"version": "2", "primary_score": "strict", "scores": []}}},
            "reusebench score",
        ),
    ],
)
def test_problems_of_the_run_itself(changes: dict[str, Any], expected: str) -> None:
    run, records = run_of(n=6)
    assert expected in problems({**run, **changes}, records)


def test_problems_of_the_records() -> None:
    run, records = run_of(n=6)
    assert "'s1'" in problems(run, change(records, "formula+pot", 0, sample="s1"))
    assert "different samples (1 only" in problems(run, change(records, "formula+direct", 0, sample="other"))
    assert "recorded twice" in problems(run, [*records, records[0]])
    hit = CacheRecord(kind="exact")
    assert "Direct has no cache" in problems(run, change(records, "formula+direct", 0, cache=hit))
    empty, _ = run_of(n=6, planned={})
    assert "Nothing was measured" in problems(empty, [])


def test_the_summary_compares_with_the_baseline_in_pairs() -> None:
    run, records = run_of(n=30)
    rows = {row.method: row for row in summarize(run, records).rows}
    assert rows["pot"].is_baseline and rows["pot"].comparison is None
    compared = rows["direct"].comparison
    assert compared is not None and compared.speedup is not None and compared.accuracy_difference is not None
    mean = {m: sum(r.latency_ns for r in records if r.cell == f"formula+{m}") for m in rows}
    assert compared.speedup.value == pytest.approx(mean["pot"] / mean["direct"])
    assert compared.clusters == 5 and compared.speedup.n == 30
    values = [rows[m].values["accuracy"] for m in ("direct", "pot")]
    assert compared.accuracy_difference.value == pytest.approx((values[0] or 0) - (values[1] or 0))
    assert compared.p is not None and compared.p_holm is not None and compared.p_holm >= compared.p


def test_the_papers_values_stand_beside_and_apart() -> None:
    run, records = run_of(SIX, n=8)
    summary = summarize(run, records)
    assert summary.paper_label == "paper (Qwen3-32B, A100)"
    rows = {row.method: row for row in summary.rows}
    paper = rows["direct"].paper
    assert paper is not None and paper.accuracy == pytest.approx(0.7592) and paper.latency_s == 0.237
    assert paper.speedup == pytest.approx(2.015 / 0.237)
    minicache = rows["minicache"].paper
    assert (
        minicache is not None and minicache.hit_rate == pytest.approx(0.8414) and minicache.accuracy is None
    )
    assert all("paper" not in column.head for column in main_columns(summary))
    assert any("paper (Qwen3-32B, A100)" in column.head for column in paper_columns(summary))
    experiment = {**run["experiment"], "paper_values": {"formula": "minicache.codetatqa"}}
    mapped = summarize({**run, "experiment": experiment}, records)
    assert mapped.rows[0].paper is not None and mapped.rows[0].paper.latency_s == 0.258
    ours = {**run["experiment"], "paper": None}
    assert summarize({**run, "experiment": ours}, records).paper_label is None


def test_entries_made_stand_beside_the_papers() -> None:
    run, records = run_of(SIX, n=12)
    ends = max(r.times.finished for r in records if r.cell == "formula+minicache" and r.index < 6) / NS
    work = [
        beside("formula+minicache", ends - 1, details={"attempted": 3, "accepted": 1}),
        beside("formula+minicache", ends + 1, details={"attempted": 2, "accepted": 0}),
        beside("formula+gencache", 1, details={"attempted": 4, "accepted": 0}),
    ]
    summary = summarize(run, records, work)
    rows = {row.method: row for row in summary.rows}
    assert rows["minicache"].paper is not None and rows["minicache"].paper.cache_gen == (23, 38)
    ours, theirs = (c for c in paper_columns(summary) if "Cache Gen" in c.head)
    assert [ours.text(rows[m]) for m in ("minicache", "gencache", "pot")] == ["1/5", "0/4", "n/a"]
    assert [theirs.text(rows[m]) for m in ("minicache", "gencache")] == ["23/38", "5/133"]
    assert rows["minicache"].values["target_calls"] != rows["pot"].values["target_calls"]
    # After warm-up: the requests after the last entry that was installed, paired with the baseline's.
    warm = rows["minicache"].comparison
    assert warm is not None and warm.warm_speedup is not None and warm.warm_speedup.n == 6
    assert rows["gencache"].comparison is not None and rows["gencache"].comparison.warm_speedup is None
    text = markdown(summary)
    assert "Cache Gen." in text and "work beside the requests" in text
    assert "Cache Gen" not in markdown(summarize(*run_of(n=6)))


def test_a_speculative_row_stands_beside_its_twin() -> None:
    run, records = run_of(("pot", "pot+specdec", "direct", "direct+specdec"), n=20)
    run["config"]["cells"][1]["first"] = 8
    run["planned"]["formula+pot+specdec"] = 8
    records = [r for r in records if r.cell != "formula+pot+specdec" or r.index < 8]
    at = next(i for i, r in enumerate(records) if r.cell == "formula+pot+specdec" and r.grade)
    told = records[at].grade
    assert told is not None
    records[at] = records[at].model_copy(update={"grade": told.model_copy(update={"extracted": "43"})})
    summary = summarize(run, records)
    assert summary.valid, summary.reasons
    rows = {row.method: row for row in summary.rows}
    twin = rows["pot+specdec"].twin
    assert rows["pot"].twin is None and twin is not None
    assert twin.flips is not None and (twin.flips.value, twin.flips.n) == (pytest.approx(1 / 8), 8)
    plain = [r.latency_ns for r in records if r.cell == "formula+pot" and r.index < 8]
    drafted = [r.latency_ns for r in records if r.cell == "formula+pot+specdec"]
    assert twin.speedup is not None and twin.speedup.value == pytest.approx(sum(plain) / sum(drafted))
    assert rows["direct+specdec"].twin is not None and "Answers flipped" in markdown(summary)
    line = next(
        one for one in csv.DictReader(io.StringIO(csv_table(summary))) if one["cell"].endswith("pot+specdec")
    )
    assert float(line["answer_flips_fraction"]) == pytest.approx(1 / 8)
    assert rows["pot+specdec"].name == "PoT+SpecDec"
    without = [cell for cell in run["config"]["cells"] if cell["method"] != "pot"]
    lonely = {**run, "config": {**run["config"], "cells": without, "baseline": "direct"}}
    assert {row.method: row.twin for row in summarize(lonely, records).rows}["pot+specdec"] is None


def test_a_labelled_variant_does_not_stand_beside_the_papers_method() -> None:
    run, records = run_of(n=6)
    run["config"]["cells"][0] |= {"label": "direct-hot"}
    row = summarize(run, records).rows[0]
    assert row.method == "direct-hot" and row.paper is not None and row.paper.empty


def test_incomplete_rows_are_marked() -> None:
    run, records = run_of(n=10)
    summary = summarize(run, [r for r in records if r.cell != "formula+exactcache"][:-1])
    assert [row.unranked for row in summary.rows] == ["", "incomplete: 9 of 10", "not run"]
    text = markdown(summary)
    assert "INVALID" in text and "not ranked: not run" in text


def test_findings_say_undecided_where_the_interval_does() -> None:
    run, records = run_of(n=50)
    said = findings(summarize(run, records))
    assert said[0].startswith("PoT (the baseline) is right on")
    direct = next(s for s in said if s.startswith("Direct"))
    assert "× faster than PoT (paired mean ratio, 95 % CI" in direct and "less accurate" in direct
    assert "whether its accuracy differs is undecided" in next(s for s in said if s.startswith("ExactCache"))
    few = findings(summarize(*run_of(n=3)))
    assert all("undecided" in sentence for sentence in few[1:])
    (only,) = findings(summarize(run, records[:-1]))
    assert "INVALID" in only


def test_csv_is_raw_and_complete() -> None:
    summary = summarize(*run_of(n=12))
    lines = list(csv.DictReader(io.StringIO(csv_table(summary))))
    assert [line["cell"] for line in lines] == [row.cell for row in summary.rows]
    assert float(lines[0]["latency_mean_s"]) == summary.rows[0].values["latency_mean"]
    assert lines[0]["hit_rate_fraction"] == "" and lines[0]["latency_p99_s"] == ""
    assert float(lines[0]["speedup_over_baseline_ratio_low"]) > 0
    assert lines[1]["is_baseline"] == "True" and lines[1]["speedup_over_baseline_ratio"] == ""


def test_latex_is_escaped() -> None:
    run, records = run_of(n=8)
    run["config"]["cells"][0]["label"] = "a_b & 50% {x} \\ $"
    text = latex_table(summarize(run, records))
    assert r"a\_b \& 50\% \{x\} \textbackslash{} \$" in text
    assert text.count(r"\begin{tabular}") == 1 and r"\toprule" in text


def test_the_terminal_table() -> None:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(show(summarize(*run_of(n=8))))
    text = console.export_text()
    assert "PoT" in text and "VALID" in text and "Accuracy" in text


def test_plain_shows_what_hides() -> None:
    assert plain("a\u202eb\x00\u200b\tc\n") == "a<U+202E>b<U+0000><U+200B>\tc\n"


def test_names_and_sources() -> None:
    assert display_name("pot+specdec") == "PoT+SpecDec"
    assert display_name("mine") == "mine"
    run, _ = run_of(n=1)
    assert source_label(run) == "live, laptop pair on this machine"
    run["config"]["pair"]["target"]["kind"] = "mock"
    assert "no model" in source_label(run)


def test_a_method_looks_the_same_everywhere() -> None:
    assert looks(["pot"])["pot"] == looks(list(SIX))["pot"]
    assert looks(["pot+specdec"])["pot+specdec"].colour == looks(["pot"])["pot"].colour
    twelve = looks([f"m{i}" for i in range(12)])
    assert len(set(twelve.values())) == 12


def test_figures_are_the_same_every_time() -> None:
    summary = summarize(*run_of(n=8))
    first, second = render(summary), render(summary)
    assert first == second and len(first) == 2
    assert all(figure.png.startswith(b"\x89PNG") and b"<dc:date>" not in figure.svg for figure in first)
    assert "n = 8" in first[0].caption and "live, laptop pair" in first[0].caption


def test_names_in_a_crowd_do_not_overlap() -> None:
    methods = (*SIX, *(f"{m}+specdec" for m in SIX))
    assert len(render(summarize(*run_of(methods, n=20)))) == 2


def test_write_report_replaces_the_whole_folder(tmp_path: Path) -> None:
    run, records = run_of(n=8)
    old = tmp_path / "report" / "stale.txt"
    old.parent.mkdir()
    old.write_text("old")
    files = write_report(tmp_path, run, records)
    assert files[0] == tmp_path / "report" / "index.html" and all(file.is_file() for file in files)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report"] and not old.exists()
    assert {file.suffix for file in files} == {".html", ".md", ".csv", ".tex", ".png", ".svg"}
    first = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in write_report(tmp_path, run, records)] == first


def test_the_index_links_relatively(tmp_path: Path) -> None:
    run, records = run_of(n=6)
    run_dir = tmp_path / "runs" / "a b"
    run_dir.mkdir(parents=True)
    write_report(run_dir, run, records)
    page = write_index(tmp_path / "out", [(run_dir, run, records, [])])
    assert 'href="../runs/a%20b/report/index.html"' in page.read_text()
    assert "No runs yet" in write_index(tmp_path / "empty", []).read_text()


def bad_inputs() -> dict[str, tuple[dict[str, Any], list[Record]]]:
    run, records = run_of(n=8)
    failures = [
        record(r.cell, r.index, outcome="timeout") if r.cell == "formula+exactcache" else r for r in records
    ]
    instant = Times(scheduled=NS, started=NS, finished=NS)
    bare, _ = run_of(n=8)
    for key in ("experiment", "git", "machine", "packages", "engines", "datasets", "workloads", "planned"):
        bare[key] = None
    bare["config"]["baseline"] = None
    return {
        "no records": (run, []),
        "one cell failed": (run, failures),
        "everything failed": (run, [record(r.cell, r.index, outcome="infra_error") for r in records]),
        "one sample": run_of(n=1),
        "two samples": run_of(n=2),
        "no time passed": (run, [r.model_copy(update={"times": instant}) for r in records]),
        "ungraded": (run, [r.model_copy(update={"grade": None}) for r in records]),
        "huge reply": (run, [r.model_copy(update={"reply": "x" * 200_000}) for r in records]),
        "unknown cell": (run, [*records, record("nowhere", 0)]),
        "bare run": (bare, records),
    }


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_renders(name: str, tmp_path: Path) -> None:
    run, records = bad_inputs()[name]
    files = write_report(tmp_path, run, records)
    html = files[0].read_text()
    assert "n/a" in html and len(html) < 3_000_000
    shown = re.sub(r'base64,[^"]*', "", html.split("<body>")[1].split("</main>")[0])
    assert not re.search(r"\b(nan|None|inf)\b", shown)
    write_index(tmp_path, [(tmp_path, run, records, [])])
    Console(file=io.StringIO()).print(show(summarize(run, records)))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run, records = run_of(n=8, id=HOSTILE)
    run["experiment"] |= {"title": HOSTILE, "about": HOSTILE}
    run["config"]["cells"][2]["label"] = HOSTILE
    run["packages"] = {HOSTILE: HOSTILE}
    bad = grade(0.0).model_copy(update={"explanation": HOSTILE, "extracted": HOSTILE})
    cache = CacheRecord(kind="miss", reason=HOSTILE)
    records = [r.model_copy(update={"reply": HOSTILE, "grade": bad, "cache": cache}) for r in records]
    html = write_report(tmp_path, run, records)[0].read_text()
    body = html.split("<body>")[1]
    assert "<script>alert" not in body and "<img src=//" not in body
    assert "\u202e" not in html and "\x00" not in html and "&lt;U+202E&gt;" in body
    assert "\n#" not in markdown(summarize(run, records)).split("\n", 1)[1].split("## Beside")[0]


def test_false_hits_are_the_first_examples() -> None:
    run, records = run_of(n=8)
    records = change(records, "formula+pot", 6, grade=grade(1.0))
    wrong_hit = {"grade": grade(0.0), "cache": CacheRecord(kind="exact")}
    row = summarize(run, change(records, "formula+exactcache", 6, **wrong_hit)).rows[2]
    first = examples(row)[0]
    assert first["sample"] == "s6" and first["verdict"] == "Wrong"
    assert {"Outcomes", "Cache events", "Every metric"} <= {
        name for name, _ in cell_details(row, ["rounded"])
    }


def test_how_to_reproduce() -> None:
    run, _ = run_of(n=1)
    assert command(run) == "reusebench reproduce minicache-finance --profile laptop"
    assert command({**run, "command": ["reusebench", "run", "x"]}) == "reusebench run x"
    assert command({**run, "experiment": {"id": "adhoc"}}) is None


def test_the_page_needs_nothing_from_outside() -> None:
    summary = summarize(*run_of(n=8))
    html = render_page(summary, render(summary))
    shell = re.sub(r'data:image/svg\+xml;base64,[^"]*', "", html)
    assert not re.search(r"https?://|src=\"(?!\")|@import|url\(", shell)


def test_reports_import_without_the_plotting_libraries() -> None:
    code = "import sys, reports.page; sys.exit(bool({'matplotlib', 'seaborn', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
