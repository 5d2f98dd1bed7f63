from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.results.made import KNOWING, THREAT, changed, made_cell, made_summary

from leaktight.core.errors import LeakFoundError, LeaktightError, UsageError
from leaktight.report.machines.decision import write_decision
from leaktight.report.machines.gate import check_gate, parse_gate
from leaktight.report.machines.junit import to_junit
from leaktight.report.machines.sarif import to_sarif
from leaktight.report.machines.verdicts import Place
from leaktight.results.schema import (
    WORDS,
    AttackerVerdict,
    Flag,
    FlagPlace,
    Significance,
    Summary,
    Track,
    Verdict,
    Word,
)

OLD = Path(__file__).parents[1] / "results" / "old"
LEVELS = ("reconstructed", "identified", "labels")


def attacker(attack: str, word: Word, **changes: Any) -> AttackerVerdict:
    fields = {"attack": attack, "adaptive": False, "threat": THREAT, "because": f"{attack} says {word}."}
    return AttackerVerdict.model_validate(fields | {"verdict": word, "victims": 5, "reconstructed": 0} | changes)


def verdict(defense: str, word: Word, track: Track = "diagnostic", **changes: Any) -> Verdict:
    fields: dict[str, Any] = {"defense": defense, "track": track, "threat": THREAT, "verdict": word}
    fields |= {"because": f"the reason for {word}.", "worst_attack": "csdlg", "victims": 5}
    return Verdict.model_validate(fields | {"attackers": (attacker("csdlg", word),)} | changes)


def judged(*verdicts: Verdict, **changes: Any) -> Summary:
    test = Significance(victims=5, chance=0.001, corrected=0.004)
    cells = [made_cell(defense=each.defense, track=each.track, seconds=2.0, identification=test) for each in verdicts]
    return made_summary(*cells, verdicts=verdicts, **changes)


FULL = judged(
    verdict("none", "reconstructed"),
    verdict("outpost", "identified", advice=""),
    verdict("noise", "nothing-found", below=0.14),
    verdict("dp", "cannot-conclude", advice="Set --trials 20."),
    verdict("lrp", "labels-read"),
    verdict("none", "identified", "production"),
    command="leaktight audit --fail-on labels",
    digest="ab" * 32,
    flags=(
        Flag(code="too-few-trials", raised_if="few", advice="More.", detail="3"),
        Flag(code="not-finite", cell=FlagPlace(attack="csdlg", defense="dp"), raised_if="x", advice="y", detail="z"),
        Flag(code="not-finite", cell=FlagPlace(attack="csdlg", defense="dp"), raised_if="x", advice="y", detail="w"),
    ),
)


def outcome(summary: Summary, level: str) -> int:
    try:
        check_gate(summary, level)
    except LeakFoundError:
        return 3
    except LeaktightError:
        return 1
    return 0


@pytest.mark.parametrize(
    ("word", "codes"),
    [
        ("reconstructed", (3, 3, 3)),
        ("identified", (0, 3, 3)),
        ("labels-read", (0, 0, 3)),
        ("nothing-found", (0, 0, 0)),
        ("cannot-conclude", (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("track", ["diagnostic", "production"])
def test_a_gate_fails_for_its_level_and_worse_ones(word: Word, codes: tuple[int, ...], track: Track) -> None:
    defended = judged(verdict("none", "reconstructed"), verdict("noise", word, track))
    assert tuple(outcome(defended, level) for level in LEVELS) == codes
    alone = judged(verdict("none", word, track))
    assert tuple(outcome(alone, level) for level in LEVELS) == codes, "without a defense, the undefended update counts"


@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4), level=st.sampled_from(LEVELS))
def test_the_worst_verdict_decides(words: list[Word], level: str) -> None:
    single = [outcome(judged(verdict("noise", word)), level) for word in words]
    whole = judged(*(verdict(f"noise({number})", word) for number, word in enumerate(words)))
    assert outcome(whole, level) == (3 if 3 in single else 1 if 1 in single else 0)


def test_the_message_names_defense_track_level_and_attack() -> None:
    with pytest.raises(LeakFoundError) as caught:
        check_gate(FULL, "labels")
    assert str(caught.value) == (
        "--fail-on labels: outpost (diagnostic): identified by csdlg; lrp (diagnostic): labels read by csdlg; "
        "see runs/made"
    )
    with pytest.raises(LeaktightError) as unsure:
        check_gate(FULL, "reconstructed")
    assert str(unsure.value) == (
        "--fail-on reconstructed can be neither passed nor failed: dp (diagnostic): cannot conclude, the reason for "
        "cannot-conclude. Set --trials 20; see runs/made"
    )


def test_the_message_says_whether_the_attacker_knows_the_defense() -> None:
    with pytest.raises(LeakFoundError, match=r"noise .*: identified by csdlg with knowledge of the defense; see"):
        check_gate(judged(verdict("noise", "identified", threat=KNOWING)), "identified")


def test_a_defense_without_a_verdict_passes_no_gate() -> None:
    cells = (made_cell(), made_cell(defense="noise"))
    bare = made_summary(*cells, verdicts=(verdict("none", "nothing-found"),))
    with pytest.raises(LeaktightError, match=r"neither passed nor failed: noise \(diagnostic\): no verdict"):
        check_gate(bare, "labels")
    failed = judged(verdict("none", "nothing-found"), training_failed={"lrp": "it\ndiverged"})
    with pytest.raises(LeaktightError, match=r"lrp .*: no verdict, training failed: it diverged"):
        check_gate(failed, "labels")
    production = judged(verdict("noise", "nothing-found", "production"), training_failed={"noise (production)": "why"})
    assert outcome(production, "labels") == 0, "the verdict counts"
    with pytest.raises(LeaktightError, match="the run has no verdict"):
        check_gate(made_summary(), "labels")


def test_a_defense_that_the_budget_left_out_passes_no_gate() -> None:
    planned = [Place("diagnostic", name) for name in ("none", "noise", "lrp")]
    partly = judged(verdict("none", "reconstructed"), verdict("noise", "nothing-found"))
    assert outcome(partly, "labels") == 0
    with pytest.raises(LeaktightError, match=r"neither passed nor failed: lrp \(diagnostic\): no verdict"):
        check_gate(partly, "labels", planned)
    bare = judged(verdict("none", "reconstructed"))
    with pytest.raises(LeaktightError, match="neither passed nor failed") as caught:
        check_gate(bare, "labels", planned)
    assert not isinstance(caught.value, LeakFoundError), "the undefended update does not count here"


def test_a_crash_of_an_attack_that_works_passes_no_gate_behind_a_milder_leak() -> None:
    crashed = attacker("dlg", "cannot-conclude", because="dlg has no valid trial: 5 ended in an error.")
    mild = verdict("noise", "labels-read", attackers=(attacker("csdlg", "labels-read"), crashed))
    weak = judged(verdict("none", "reconstructed", attackers=(attacker("csdlg", "reconstructed"),)), mild)
    assert outcome(weak, "identified") == 0, "dlg finds nothing without a defense, either"
    works = (attacker("csdlg", "reconstructed"), attacker("dlg", "identified"))
    strong = judged(verdict("none", "reconstructed", attackers=works), mild)
    with pytest.raises(LeaktightError, match="labels read by csdlg, but dlg cannot be judged, dlg has no") as caught:
        check_gate(strong, "identified")
    assert not isinstance(caught.value, LeakFoundError)
    assert outcome(strong, "labels") == 3


def test_a_milder_leak_on_few_victims_does_not_exclude_a_worse_one() -> None:
    for victims, code in ((18, 1), (19, 0)):
        mild = judged(verdict("noise", "identified", victims=victims), confidence=0.15)
        assert outcome(mild, "reconstructed") == code
        assert outcome(mild, "identified") == 3
    with pytest.raises(LeaktightError, match="identified by csdlg, but 5 victims are too few to exclude a worse leak"):
        check_gate(judged(verdict("noise", "identified"), confidence=0.15), "reconstructed")


def test_victims_that_seem_to_be_reconstructed_pass_no_gate_behind_a_milder_leak() -> None:
    reader = attacker("csdlg", "labels-read", reconstructed=1)
    with pytest.raises(LeaktightError, match="seems to reconstruct 1 of 5 victims, maybe by chance"):
        check_gate(judged(verdict("noise", "labels-read", attackers=(reader,))), "identified")


@pytest.mark.parametrize(
    ("levels", "told"),
    [
        (("nothing-found",), "this verdict is no leak: name the mildest leak that is to fail"),
        (("cannot-conclude",), "this verdict is no leak"),
        (("labels-read",), "did you mean 'labels'"),
        (("reconstruted",), "did you mean 'reconstructed'"),
        (("",), "choose from: identified, labels, reconstructed"),
        (("labels", "identified"), "expected one --fail-on, got labels and identified"),
        (("labels", "labels", "reconstructed"), "expected one --fail-on"),
    ],
)
def test_levels_that_contradict_or_are_none_are_explained(levels: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_gate(levels)


def test_one_level_may_be_said_twice() -> None:
    assert parse_gate(["labels", "labels"]) == "labels"
    assert parse_gate([]) is None


def read_junit(summary: Summary) -> Xml.Element:
    """The document, checked against what readers of JUnit XML rely on."""
    root = Xml.fromstring(to_junit(summary))
    assert root.tag == "testsuites"
    for suite in root:
        assert suite.tag == "testsuite"
        tags = [child.tag for child in suite]
        assert tags == ["properties"] + ["testcase"] * (len(tags) - 1)
        names = [(case.get("classname"), case.get("name")) for case in suite.iter("testcase")]
        assert len(set(names)) == len(names)
        assert all(all(name) for name in names)
        for case in suite.iter("testcase"):
            assert set(case.keys()) == {"name", "classname", "time"}
            assert {child.tag for child in case} <= {"failure", "error", "skipped", "system-out"}
            assert sum(child.tag != "system-out" for child in case) <= 1
    for element in root.iter():
        if element.tag in ("testsuites", "testsuite"):
            cases = list(element.iter("testcase"))
            counts = {"tests": len(cases)} | {
                name: len(list(element.iter(tag)))
                for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
            }
            assert {name: int(element.get(name, "-1")) for name in counts} == counts
            total = sum(float(case.get("time", "nan")) for case in cases)
            assert float(element.get("time", "nan")) == pytest.approx(total)
        elif element.tag in ("failure", "error"):
            assert element.get("type")
            assert element.get("message")
    return root


def test_junit_has_a_suite_a_track_and_a_case_a_defense() -> None:
    root = read_junit(FULL)
    assert [suite.get("name") for suite in root] == ["leaktight diagnostic", "leaktight production"]
    found = {
        case.get("name"): next((child.tag for child in case if child.tag != "system-out"), "passed")
        for case in root[0].iter("testcase")
    }
    assert found == {
        "no defense": "skipped",
        "outpost": "failure",
        "noise": "passed",
        "dp": "error",
        "lrp": "failure",
    }
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "6",
        "failures": "2",
        "errors": "1",
        "skipped": "2",
        "time": "48.000",
    }
    failure = root.find("testsuite/testcase[@name='outpost']/failure")
    assert failure is not None
    assert (failure.get("type"), failure.get("message")) == ("identified", "identified: the reason for identified.")
    assert "- csdlg: identified; csdlg says identified. [identification: by chance 0.4 %]" in (failure.text or "")
    assert root.find("testsuite/properties/property[@name='digest']").get("value") == "ab" * 32  # type: ignore[union-attr]


def test_junit_of_a_run_without_a_defense_fails_for_its_leak() -> None:
    assert [child.tag for child in read_junit(judged(verdict("none", "reconstructed")))[0][1]] == ["failure"]
    missing = made_summary(made_cell(defense="noise"), training_failed={"lrp": "it <diverged>"})
    assert [case.find("error").get("message") for case in read_junit(missing).iter("testcase")] == [  # type: ignore[union-attr]
        "no-verdict: the run gave no verdict",
        "no-verdict: it <diverged>",
    ]


@given(name=st.text(min_size=1), because=st.text(), word=st.sampled_from(WORDS))
def test_junit_is_legal_xml_whatever_names_and_errors_hold(name: str, because: str, word: Word) -> None:
    hostile = verdict(f"a{name}", word, because=because, advice=because, attackers=(attacker(name, word),))
    text = to_junit(judged(hostile, command=because, training_failed={f"b{name}": because}))
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", text)
    text.encode()
    (case, *_) = read_junit(judged(hostile)).iter("testcase")
    assert case.get("name") == " ".join(
        re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "\ufffd", f"a{name}").split()
    )


def test_markup_in_names_stays_text() -> None:
    name = '</testcase><testcase name="x"/>&amp;]]>\x1b[2J\x00'
    (case,) = read_junit(judged(verdict(name, "nothing-found"))).iter("testcase")
    assert case.get("name") == name.replace("\x1b", "\ufffd").replace("\x00", "\ufffd")


def read_sarif(summary: Summary, config: str = "seed = 0\n") -> dict[str, Any]:
    """The only run of the document, checked for what SARIF 2.1.0 requires of the properties in use."""
    document = json.loads(to_sarif(summary, config))
    assert set(document) == {"$schema", "version", "runs"}
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    assert set(run) <= {"tool", "invocations", "columnKind", "results", "properties"}
    driver = run["tool"]["driver"]
    assert driver["name"] == "Leaktight"
    assert re.fullmatch(r"\d+\.\d+\.\d+", driver["semanticVersion"])
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(set(rules)) == len(rules)
    for rule in driver["rules"]:
        assert rule["help"]["text"]
        assert rule["shortDescription"]["text"].endswith(".")
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    assert [each["executionSuccessful"] for each in run["invocations"]] == [True]
    prints = [tuple(result["partialFingerprints"].values()) for result in run["results"]]
    assert len(set(prints)) == len(prints)
    for result in run["results"]:
        assert result["ruleId"] in rules
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        (place,) = result["locations"]
        assert place["physicalLocation"]["artifactLocation"]["uri"] == "config.toml"
        assert place["physicalLocation"]["region"]["startLine"] >= 1
        assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
        for each in place.get("logicalLocations", ()):
            assert set(each) == {"name", "fullyQualifiedName", "kind"}
    found: dict[str, Any] = run
    return found


def test_sarif_has_a_result_for_each_leak_doubt_and_flag() -> None:
    run = read_sarif(FULL)
    results = run["results"]
    assert [(each["ruleId"], each["level"]) for each in results] == [
        ("reconstructed", "note"),
        ("identified", "error"),
        ("cannot-conclude", "warning"),
        ("labels-read", "warning"),
        ("identified", "note"),
        ("too-few-trials", "note"),
        ("not-finite", "note"),
        ("not-finite", "note"),
    ]
    assert [each["fullyQualifiedName"] for each in results[1]["locations"][0]["logicalLocations"]] == [
        "diagnostic",
        "diagnostic/outpost",
        "diagnostic/outpost/csdlg",
    ]
    (evidence,) = results[1]["properties"]["attackers"]
    assert evidence["identification"] == {"victims": 5, "chance": 0.001, "corrected": 0.004}
    assert (evidence["victims"], results[1]["properties"]["victims"]) == (5, 5)
    assert "Set --trials 20." in results[2]["message"]["text"]
    assert {"track": "diagnostic", "defense": "noise", "verdict": "nothing-found"} in run["properties"]["verdicts"]


def test_fingerprints_are_those_of_the_finding_and_the_settings() -> None:
    def prints(summary: Summary, config: str = "seed = 0\n") -> list[str]:
        return [
            each["partialFingerprints"]["primaryLocationLineHash"] for each in read_sarif(summary, config)["results"]
        ]

    again = changed(FULL, run="runs/audit-002", digest="cd" * 32, command="leaktight audit")
    assert prints(again) == prints(FULL)
    assert not set(prints(FULL, "seed = 1\n")) & set(prints(FULL))


def test_texts_of_sarif_have_no_placeholders_and_no_links() -> None:
    run = read_sarif(judged(verdict("noise{0}", "identified", because="see [here](https://example.org).")))
    assert run["results"][0]["message"]["text"] == (
        "noise{{0}} (diagnostic): identified. see [here] (https://example.org)."
    )


def test_a_defense_that_could_not_be_judged_has_a_result() -> None:
    run = read_sarif(made_summary(made_cell(defense="noise"), training_failed={"noise": "it diverged"}))
    assert [(each["ruleId"], each["message"]["text"]) for each in run["results"]] == [
        ("cannot-conclude", "noise (diagnostic): cannot conclude. it diverged")
    ]


@pytest.mark.parametrize("name", ["audit", "failed", "inspect", "inspect-blind", "tradeoff"])
def test_both_files_can_be_written_for_earlier_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes((OLD / name / "summary.json").read_bytes())
    write_decision(tmp_path)
    assert Xml.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"
    assert json.loads((tmp_path / "sarif.json").read_text())["version"] == "2.1.0"


def test_a_run_that_is_not_finished_has_no_decision(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not finished"):
        write_decision(tmp_path)
