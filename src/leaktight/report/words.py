"""Numbers and facts as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from leaktight.core.threat_presets import placed
from leaktight.results.schema import UNDEFENDED, Score, Summary, Threat, Track, TradeoffRow, Word

MISSING = "–"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Level = Word | Literal["control", "unknown"]


@dataclass(frozen=True)
class MetricWords:
    """How a metric is written. digits: after the point; None for three significant digits."""

    label: str
    unit: str = ""
    digits: int | None = 2
    meaning: str = ""


METRICS: Mapping[str, MetricWords] = {
    "psnr": MetricWords("PSNR", "dB", 1, "higher: closer to the original"),
    "ssim": MetricWords("SSIM", "", 2, "1: identical structure, 0: none in common"),
    "lpips_alex": MetricWords("LPIPS", "", 2, "0: looks the same to a trained network"),
    "mse": MetricWords("MSE", "", None, "0: identical pixels"),
    "loss": MetricWords("loss", "", None),
    "label_accuracy": MetricWords("labels found", "%", 0, "share of the batch's labels that the attack got right"),
}
"""How every number of a metric is written, wherever it is printed: see `number`."""

VERDICTS: Mapping[Word, str] = {
    "reconstructed": "Reconstructed",
    "identified": "Identified",
    "labels-read": "Labels read",
    "cannot-conclude": "Cannot conclude",
    "nothing-found": "Nothing found",
}
SYMBOLS: Mapping[Level, str] = {
    "reconstructed": "●",
    "identified": "◐",
    "labels-read": "◔",
    "cannot-conclude": "?",
    "nothing-found": "○",
    "control": "–",
}

_LEDGER: Mapping[str, str] = {
    "labels": "Labels",
    "batch_size": "Batch size",
    "num_examples": "Examples behind an update",
    "local_steps": "Local steps",
    "learning_rate": "Learning rate",
    "mode": "Network mode",
    "batch_norm": "Batch normalisation",
    "buffers_known": "Batch-norm statistics sent",
    "init": "Initial weights",
    "stage": "Training stage",
    "defense_known": "Attacker knows the defense",
    "assumed": "Other assumptions",
    "server": "Server",
    "queries": "Rounds with the victim",
}
_LEDGER_VALUES: Mapping[tuple[str, str], str] = {
    ("labels", "given"): "given to the attacker",
    ("labels", "inferred"): "inferred from the update",
    ("labels", "searched"): "searched together with the images",
    ("mode", "train"): "training",
    ("mode", "eval"): "evaluation",
    ("server", "curious"): "sent the model unchanged",
    ("server", "malicious"): "changed the model that it sent",
}


_ACCOUNTED = {"delta": 1e-05, "accountant": "rdp"}
_USUAL: Mapping[str, Mapping[str, object]] = {
    "noise": {"at": "step", "distribution": "gaussian"},
    "clipping": {"at": "step", "scope": "global"},
    "compression": {"at": "step", "scope": "tensor"},
    "minmax": {"at": "update", "unbiased": True},
    "percentile_privacy": {"per_step": True},
    "soteria": {"epsilon": 0.0},
    "graddefense": {"clip": False, "root_samples": 16, "refresh": "round", "variant": "paper"},
    "outpost": {"count": "all_rounds", "fisher": "column", "variant": "paper"},
    "dp_sgd": _ACCOUNTED,
    "fed_cdp": {**_ACCOUNTED, "decay_rounds": 100, "layers": "tensor"},
    "client_dp": {**_ACCOUNTED, "noise_shares": 1, "sampling_rate": 1.0, "adjacency": "remove"},
    "adadefense": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08, "epsilon_inside": False, "variant": "paper"},
    "fedkl": {"variant": "paper"},
}
"""By kind of defense, settings that go without saying while they have these values, their defaults."""


def metric_words(name: str) -> MetricWords:
    return METRICS.get(name) or MetricWords(name.replace("_", " "), digits=None)


def number(value: float | None, metric: str, *, unit: bool = True) -> str:
    """A score with its digits and unit.

    >>> number(34.127, "psnr"), number(0.00123456, "mse"), number(None, "ssim"), number(0.5, "label_accuracy")
    ('34.1 dB', '0.00123', '–', '50 %')
    >>> number(-0.001, "ssim")
    '0.00'
    """
    words = metric_words(metric)
    if value is None:
        return MISSING
    shown = 100 * value if words.unit == "%" else value
    if words.digits is None:
        text = significant(shown)
    else:
        text = f"{round(shown, words.digits) + 0.0:.{words.digits}f}".replace("-", "−")  # + 0.0: no "−0.00"
    return f"{text} {words.unit}" if unit and words.unit else text


def signed(value: float, metric: str, *, unit: bool = False) -> str:
    """A difference of two scores, with its sign.

    >>> signed(0.031, "ssim"), signed(-2.04, "psnr"), signed(0.001, "ssim")
    ('+0.03', '−2.0', '0.00')
    """
    text = number(value, metric, unit=unit)
    return f"+{text}" if value > 0 and number(value, metric) != number(0.0, metric) else text


def significant(value: float) -> str:
    """A number with three significant digits.

    >>> significant(0.05), significant(1234.6), significant(-3.14159), significant(2), significant(0.0000161)
    ('0.05', '1235', '−3.14', '2', '1.61 × 10⁻⁵')
    """
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, tiny, exponent = text.partition("e")
    if tiny:
        text = f"{mantissa} × 10{str(int(exponent)).translate(_RAISED)}"
    return text.replace("-", "−")


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage.

    >>> percent(0.9312), percent(None)
    ('93.1 %', '–')
    """
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def seconds(value: float | None) -> str:
    """A duration.

    >>> seconds(0.123), seconds(3.99), seconds(12.3), seconds(125)
    ('0.12 s', '4.0 s', '12 s', '2 min 5 s')
    """
    if value is None:
        return MISSING
    if value < 60:
        return f"{value:.2g} s" if value < 1 else f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{int(value) // 60} min {int(value) % 60} s"


def interval(score: Score | None, metric: str) -> str:
    """The 95 % interval, such as "0.10 to 0.20"; empty if there is none."""
    return "" if score is None else span(score.ci95, lambda end: number(end, metric, unit=False))


def span(ends: tuple[float | None, float | None] | None, write: Callable[[float], str]) -> str:
    """An interval; empty if there is none.

    >>> span((0.1, 0.25), percent), span(None, percent)
    ('10.0 to 25.0 %', '')
    """
    if ends is None or ends[0] is None or ends[1] is None:
        return ""
    low, high = map(write, (ends[0], ends[1]))
    unit = " %" if high.endswith(" %") else ""
    return f"{low.removesuffix(unit)} to {high}"


def threat_words(threat: Threat) -> str:
    """A threat model in one sentence, with its name.

    >>> threat_words(Threat(server="curious", sees="client", knows=("batch_size", "buffers", "local_training")))
    "A server that follows the protocol and sees each client's update; it knows the batch size, the buffers and the \
local training (threat model curious_server)."
    """
    server = {"curious": "follows the protocol", "malicious": "may change the model that it sends"}
    sees = {"client": "each client's update", "aggregate": "only the sum of the round's updates"}
    knows = listed(f"the {fact.replace('_', ' ')}" for fact in threat.knows) or "nothing else"
    return (
        f"A server that {server[threat.server]} and sees {sees[threat.sees]}; it knows {knows} ({threat_name(threat)})."
    )


def threat_name(threat: Threat) -> str:
    """The name of a threat model: the nearest preset, and the facts in which it differs.

    >>> threat_name(Threat(server="malicious", sees="client", knows=("batch_size", "buffers")))
    'threat model malicious_server without local training'
    """
    found = placed(threat.server, threat.sees, threat.knows)
    also = f" plus {listed(fact.replace('_', ' ') for fact in found.also)}" if found.also else ""
    without = f" without {listed(fact.replace('_', ' ') for fact in found.without)}" if found.without else ""
    return f"threat model {found.preset}{also}{without}"


def listed(items: Iterable[str]) -> str:
    """Items joined with commas and "and".

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    names = list(items)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def counted(amount: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "trial"), counted(3, "trial")
    ('1 trial', '3 trials')
    """
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def defense_words(name: str, settings: Mapping[str, object] | None = None) -> str:
    """A defense with the settings that say how strong it is and how it works; others only if their values are unusual.

    >>> defense_words("noise", {"at": "step", "distribution": "gaussian", "noise_std": 0.1}), defense_words("none")
    ('noise (noise_std 0.1)', 'no defense')
    >>> defense_words("noise(at=update)", {"at": "update", "distribution": "gaussian", "noise_std": 0.1})
    'noise (at update, noise_std 0.1)'
    >>> parts = [{"kind": "lrp", "spread": 1.0}, {"kind": "minmax", "at": "update", "keep_share": 0.05}]
    >>> defense_words("stack", {"parts": parts})
    'lrp (spread 1) + minmax (keep_share 0.05)'
    """
    if name == UNDEFENDED:
        return "no defense"
    kind, settings = name.partition("(")[0], settings or {}
    parts = settings.get("parts")
    if kind == "stack" and isinstance(parts, list | tuple):
        return " + ".join(defense_words(str(each.get("kind")), each) for each in parts if isinstance(each, Mapping))
    usual = {"kind": kind, **_USUAL.get(kind, {})}
    told = {key: value for key, value in settings.items() if key not in usual or value != usual[key]}
    return f"{kind} ({fact(told)})" if told else name


def defense_name(summary: Summary, defense: str, track: Track = "diagnostic") -> str:
    """A defense of a run with its settings."""
    return defense_words(defense, summary.defense_settings(defense, track))


def tradeoff_names(rows: Sequence[TradeoffRow]) -> list[str]:
    """The defenses of a trade-off with their settings."""
    return [defense_words(row.defense, row.settings) for row in rows]


def attack_words(name: str, adaptive: bool) -> str:
    return f"{name}, knows the defense" if adaptive else name


def fact(value: object) -> str:
    """A fact of the scenario or ledger as text.

    >>> fact(True), fact(0.05), fact(["a", 1]), fact({"kind": "sgd", "epochs": 2}), fact([])
    ('yes', '0.05', 'a, 1', 'kind sgd, epochs 2', 'nothing')
    """
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {fact(entry)}" for key, entry in value.items()) or "nothing"
    if isinstance(value, list | tuple):
        return ", ".join(fact(entry) for entry in value) or "nothing"
    return str(value)


def fact_name(key: str) -> str:
    """The name of a fact for readers.

    >>> fact_name("local_steps"), fact_name("my_setting")
    ('Local steps', 'My setting')
    """
    name = key.replace("_", " ")
    return _LEDGER.get(key) or name[:1].upper() + name[1:]


def ledger_value(key: str, value: object) -> str:
    return _LEDGER_VALUES.get((key, str(value))) or fact(value)
