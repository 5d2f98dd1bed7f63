"""The documents of a run: lines of `trials.jsonl`, and the `summary.json` of an audit, an inspection or training.

Writers build these types, readers use `parse`. `document` has only the fields that were set. `parse` ignores unknown
fields, except in a cell, where they are metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from leaktight.core.errors import ResultsError
from leaktight.core.text import as_written

SCHEMA_VERSION = 2
"""2: one verdict a defense, in new words; validity, ranks and tracks of trials."""
UNDEFENDED = "none"
"""The name of the undefended federation in results."""
VARIES: Literal["varies"] = "varies"
"""The value of a ledger fact that differs between trials."""

Direction = Literal["high", "low"]
Role = Literal["attack", "control"]
Track = Literal["diagnostic", "production"]
"""diagnostic: an update that is easy to attack. production: one of the federation's own training."""
Level = Literal["reconstructed", "identified", "labels-read"]
Word = Literal["reconstructed", "identified", "labels-read", "cannot-conclude", "nothing-found"]
LEVELS: tuple[Word, ...] = get_args(Level)
"""The words of a verdict that found something, the most severe first."""
WORDS: tuple[Word, ...] = get_args(Word)
"""From the most severe to the least."""
Fault = Literal["ended in an error", "gave values that are not finite", "its own loss did not fall"]
"""Why a trial is not valid."""
CONFIDENCE = 0.95
ERROR = 1 - CONFIDENCE
"""The largest probability that a run says more than "nothing found" of attacks that ignore the update."""
FALLEN = 0.99
"""The largest share of its first loss at which the loss of a search has fallen."""

_EXACT = 1e-8
"""Losses up to this are as good as 0."""

_LOW_LEAKS = frozenset(
    {"mse", "lpips_alex", "lpips_vgg", "mse_r", "grnn_mae", "thesis_mse_255", "fedkl_rmse", "plato_min_mse", "ggl_mse"}
)
"""Metrics that leak when low, for files without `metrics` (before 0.2); all others leak when high."""


def plain(value: object) -> object:
    """A setting as JSON: lists for tuples, null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return finite(value)


def finite(value: object) -> object:
    """The value; None for NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _readable(version: int) -> int:
    if version > SCHEMA_VERSION:
        raise ValueError(f"expected at most {SCHEMA_VERSION}: written by a later Leaktight; update Leaktight")
    if version < 1:
        raise ValueError("expected a version from 1")
    return version


_OLD_WORDS: Mapping[object, Word] = {"leaks": "reconstructed", "partly": "identified", "not-found": "nothing-found"}
"""The words of version 1, and what comes nearest to them."""


def _word(value: object) -> object:
    return _OLD_WORDS.get(value, value)


Version = Annotated[int, AfterValidator(_readable)]
Figure = Annotated[float | None, BeforeValidator(finite)]
"""A number; None if it is missing or not finite."""
Plain = Annotated[JsonValue, BeforeValidator(plain)]
Unsure = Literal["varies", "unknown"]


class Record(BaseModel):
    """Base of all documents: frozen; values of another type and missing required fields are errors."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)  # built on first use: quicker to import

    def document(self) -> dict[str, JsonValue]:
        """The fields that were set, as JSON values."""
        return self.model_dump(mode="json", exclude_unset=True)

    def facts(self) -> dict[str, object]:
        """The fields that were set, by name."""
        return {name: value for name, value in self if name in self.model_fields_set}


class Threat(Record):
    """The threat model. knows: what the attacker knows besides the model and the updates it sees, sorted by name."""

    server: Literal["curious", "malicious"]
    sees: Literal["client", "aggregate"]
    knows: tuple[str, ...]


class MetricNote(Record):
    """leaks_when: whether a high or a low score of the metric means leakage."""

    leaks_when: Direction


class Ledger(Record):
    """The conditions of a score. Unknown facts are left out or "unknown"; "varies": differs between trials."""

    labels: str | None = None
    batch_size: int | Unsure | None = None
    num_examples: int | Unsure | None = None
    local_steps: int | Unsure | None = None
    learning_rate: float | Unsure | None = None
    mode: str | None = None
    batch_norm: bool | Unsure | None = None
    buffers_known: bool | Unsure | None = None
    init: str | None = None
    stage: str | None = None
    defense_known: bool | Unsure | None = None
    assumed: tuple[str, ...] | Unsure | None = None
    server: str | None = None
    queries: int | Unsure | None = None


class Pictures(Record):
    """Paths of two PNG strips of `count` images of `size` (height, width), side by side: originals and guesses.

    truth: None if the originals are not known, as with many captured updates.
    """

    truth: str | None = None
    guess: str
    size: tuple[int, int]
    count: int = Field(ge=1)


class Rank(Record):
    """The place of the victim among itself and `decoys` others by closeness to the guess; 1 for the closest."""

    place: int = Field(ge=1)
    decoys: int = Field(ge=1)

    @property
    def chance(self) -> float:
        """The probability of this place or a better one for a guess that does not depend on the victim."""
        return self.place / (self.decoys + 1)


class Oracle(Record):
    """The best guess of an ensemble by the truth, which no attacker can choose. scores: means over the examples."""

    attack: str
    scores: dict[str, Figure]


class TrialHead(Record):
    """The fields of a trial that are known before it runs.

    searches: whether the attack minimises a loss of its own. model_accuracy: of the attacked model.
    """

    schema_version: Version
    id: str
    attack: str
    attack_settings: dict[str, Plain] = {}
    role: Role
    defense: str
    defense_settings: dict[str, Plain] = {}
    adaptive: bool
    track: Track = "diagnostic"
    searches: bool = True
    trial: int
    round: int
    client: str
    seed: int
    threat: Threat
    model_accuracy: Figure = None


class Proof(Record):
    """What an attack proves about its guess from the update alone: `figure` of at least `needed`. proof: in words."""

    proof: str
    figure: Figure
    needed: float
    holds: bool


class TrialOutcome(Record):
    """The result of a trial.

    examples: a digest of the true examples. guesses: the number that the attack returned; only as many as there are
    examples were scored. scores: by metric, one number per true example; None for a metric that cannot be computed
    here. metrics: which way each leaks. rank: of the victim among decoys of its classes. decoy_scores: by metric, for
    each example the closest decoy's score. label_accuracy: None if labels were given. label_chance: the probability of
    that accuracy for a guess without the update; blind_labels: the mean accuracy of such guesses. labels: those of the
    guess. first_loss, loss: of the attack's search at its start and end. update_changed: whether the defense changed
    the update. client_seconds: the time of the client's round. certificate: the attack's own proof, if it has one.
    chosen: the attack of an ensemble whose guess was judged; oracle: the best of all its guesses. backend: how the
    search of that guess ran: eager, traced (fx) or compiled (inductor); None if there was none.
    """

    status: Literal["done", "failed"] = "done"
    error: str | None = None
    ledger: Ledger = Ledger()
    examples: str | None = None
    guesses: int | None = None
    scores: dict[str, tuple[Figure, ...] | None] = {}
    metrics: dict[str, MetricNote] = {}
    rank: Rank | None = None
    decoy_scores: dict[str, tuple[Figure, ...]] = {}
    label_accuracy: Figure = None
    label_chance: Figure = None
    blind_labels: Figure = None
    labels: tuple[int, ...] | None = None
    loss: Figure = None
    first_loss: Figure = None
    update_changed: bool | None = None
    client_seconds: Figure = None
    images: Pictures | None = None
    certificate: Proof | None = None
    chosen: str | None = None
    oracle: Oracle | None = None
    backend: str | None = None


class Trial(TrialHead, TrialOutcome):
    """One line of `trials.jsonl`: one attack on one victim with one defense in one round."""

    seconds: float
    warnings: tuple[str, ...] = ()

    def score(self, metric: str) -> float | None:
        """The mean of a metric over the trial's examples."""
        return mean(self.scores.get(metric) or ())

    def leaks_when(self, metric: str) -> Direction:
        return leaks_when(metric, self.metrics)

    @property
    def fault(self) -> Fault | None:
        """Why the trial says nothing about its victim; None for a valid trial."""
        if self.status == "failed":
            return "ended in an error"
        missing = any(score is None for scores in self.scores.values() if scores is not None for score in scores)
        if missing or (self.searches and self.role == "attack" and self.loss is None):
            return "gave values that are not finite"
        if self.stuck:
            return "its own loss did not fall"
        return None

    @property
    def stuck(self) -> bool:
        """Whether the attack searches and its own loss has not fallen."""
        first, last = self.first_loss, self.loss
        if not self.searches or first is None or last is None or abs(first) <= _EXACT:
            return False
        return last > first - (1 - FALLEN) * abs(first)


class Score(Record):
    """A metric over the trials of a cell: mean, 95 % interval, and the value of the most leaking trial (worst)."""

    mean: Figure
    ci95: tuple[Figure, Figure] | None = None
    worst: Figure = None


class _Scored(Record):
    """A record whose other fields are metrics."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Score | None] = Field(init=False)

    @property
    def scores(self) -> dict[str, Score]:
        """The metrics that could be computed, by name."""
        return {name: score for name, score in self.__pydantic_extra__.items() if score is not None}

    def mean_of(self, metric: str) -> float | None:
        return self.scores[metric].mean if metric in self.scores else None

    def worst_of(self, metric: str) -> float | None:
        return self.scores[metric].worst if metric in self.scores else None

    def with_scores(self, scores: Mapping[str, Score | None]) -> Self:
        return self.model_copy(update=scores)


class Significance(Record):
    """A test over victims of "the guess does not depend on the update".

    chance: the probability of so good a result or a better one if that is true. corrected: for all tests of the run.
    """

    victims: int
    chance: float
    corrected: float

    @property
    def passed(self) -> bool:
        """Whether chance alone explains the result no longer."""
        return self.corrected <= ERROR


class Cell(_Scored):
    """One attack on one defense, over all its trials.

    valid: trials without a fault; faults: the number of the others by reason. victims: with valid trials; several
    rounds of one victim count once. reconstructed: how many of them were; success_rate: their share. identification,
    label_reading: tests over the victims. control: by metric, the score of the best guess without the update.
    first_loss, loss, labels: of an inspection's only trial. chosen: how often each attack of an ensemble was chosen by
    its own evidence. oracle: mean scores if the truth had chosen, which no attacker can do.
    """

    attack: str
    role: Role
    defense: str
    adaptive: bool
    track: Track = "diagnostic"
    threat: Threat
    trials: int
    failed: int
    valid: int | None = None
    faults: dict[str, int] = {}
    victims: int | None = None
    reconstructed: int | None = None
    success_rate: Figure = None
    identification: Significance | None = None
    label_reading: Significance | None = None
    control: dict[str, Figure] = {}
    seconds: Figure = None
    flags: tuple[str, ...] = ()
    trial_ids: tuple[str, ...] = ()
    first_loss: Figure = None
    loss: Figure = None
    labels: tuple[int, ...] | None = None
    chosen: dict[str, int] = {}
    oracle: dict[str, Figure] = {}

    @property
    def done(self) -> int:
        """The number of finished trials."""
        return max(self.trials - self.failed, 0)

    @property
    def judged(self) -> int:
        """The number of victims that the success rate is about; in old files that of finished trials."""
        return self.done if self.victims is None else self.victims

    @property
    def leaked(self) -> int | None:
        """The number of victims that were reconstructed; None if not judged."""
        return None if self.success_rate is None else round(self.success_rate * self.judged)


class AttackerVerdict(Record):
    """What one attack found. victims: with valid trials. reconstructed: how many of them."""

    attack: str
    adaptive: bool
    threat: Threat
    verdict: Annotated[Word, BeforeValidator(_word)]
    because: str
    victims: int
    reconstructed: int


class Verdict(Record):
    """The conclusion about a defense: the worst over attackers and victims.

    threat: of the strongest attacker. because: the evidence. advice: what to do if nothing can be concluded, else "".
    victims: those that the conclusion rests on. below: "nothing-found" claims with 95 % confidence that fewer than this
    share of victims are reconstructed. worst_attack: the strongest attack. trial_id: its most leaking trial.
    example: the one of that trial's examples, from 0, that shows the finding best. attackers: every attack by itself,
    the strongest first. certified: the attack proved it without the truth.
    """

    defense: str
    track: Track = "diagnostic"
    threat: Threat
    verdict: Annotated[Word, BeforeValidator(_word)]
    because: str
    advice: str = ""
    victims: int | None = None
    below: Figure = None
    worst_attack: str | None = None
    trial_id: str | None = None
    example: int | None = None
    attackers: tuple[AttackerVerdict, ...] = ()
    certified: bool = False


class Answer(Record):
    """The result in five sentences. recommended: of a trade-off, which leads with it; None for an audit."""

    recommended: str | None = None
    leaks: str
    to_whom: str
    how_sure: str
    helps: str
    costs: str


class Spending(Record):
    """What a run spent. planned: the most trials that its rule could have asked for. budget: in minutes, or None.

    ended: why no further trials were run.
    """

    trials: int
    planned: int
    minutes: float
    budget: Figure = None
    ended: Literal["decided", "all trials", "budget"]


class FlagPlace(Record):
    """Where a flag was raised. attack: None for all attacks on the defense."""

    attack: str | None = None
    defense: str


class Flag(Record):
    """A reason to doubt a figure. cell: None for the whole run. detail: the numbers."""

    code: str
    cell: FlagPlace | None = None
    raised_if: str
    advice: str
    detail: str


class Leak(Record):
    """The leakage of a defense: `metric` and PSNR of its most leaking trial, and the mean over that attack's trials.

    ci95: the interval of the mean. less: how much lower than without a defense, over the same victims.
    """

    metric: str = "ssim"
    worst: Figure = None
    average: Figure = None
    ci95: tuple[Figure, Figure] | None = None
    attack: str | None = None
    psnr: Figure = None
    less: Score | None = None


class TradeoffRow(Record):
    """A defense: leakage, final accuracy, seconds of the median round, share of client time, Pareto front or not.

    accuracy_ci95: the interval of the accuracy over test examples. learned: whether it is clearly above chance.
    client_seconds, client_bytes: of one client in the median round, its training and what it sends.
    """

    defense: str
    settings: dict[str, Plain] = {}
    leak: Leak
    accuracy: Figure = None
    accuracy_ci95: tuple[Figure, Figure] | None = None
    learned: bool | None = None
    seconds_per_round: Figure = None
    cost_share: Figure = None
    client_seconds: Figure = None
    client_bytes: Figure = None
    on_front: bool = False


class Recommendation(Record):
    """The recommended defense, or None, and the reason. among: defenses of which none can be preferred."""

    defense: str | None = None
    among: tuple[str, ...] = ()
    because: str


class Tradeoff(Record):
    """The defenses of a trade-off, and the recommendation.

    chance: the accuracy of always naming the largest class. examples: on which accuracy was measured.
    """

    rows: tuple[TradeoffRow, ...]
    recommendation: Recommendation | None = None
    chance: Figure = None
    examples: int | None = None


class Moment(_Scored):
    """The leakage of an attack on a defense in one round. accuracy: of the attacked model."""

    defense: str
    attack: str
    adaptive: bool
    round: int
    accuracy: Figure = None
    success_rate: Figure = None
    trials: int


class Summary(Record):
    """`summary.json` of an audit, a trade-off or an inspection.

    scenario: facts for readers. answer: the result in five sentences. leaked_if: when a trial reconstructed its victim.
    confidence: the share of victims that "nothing-found" has to stay below. spending: of trials and time. digest: of
    all trials, see `leaktight verify`. ledger: the conditions that all attacks share.
    training_failed: by defense, why training failed. over_time: None unless several rounds were attacked.
    truth_given: False for an inspection without the true images. defenses: all settings of each, by `training_name`.
    earlier_looks: how often a summary of fewer trials was written before the run went on; chances are corrected for it.
    """

    schema_version: Version
    run: str
    command: str = ""
    scenario: dict[str, Plain] = {}
    cells: tuple[Cell, ...]
    answer: Answer | None = None
    metrics: dict[str, MetricNote] = {}
    leaked_if: str = ""
    confidence: Figure = None
    spending: Spending | None = None
    digest: str | None = None
    verdicts: tuple[Verdict, ...] = ()
    flags: tuple[Flag, ...] = ()
    ledger: Ledger = Ledger()
    training_failed: dict[str, str] = {}
    tradeoff: Tradeoff | None = None
    over_time: tuple[Moment, ...] | None = None
    truth_given: bool = True
    defenses: dict[str, dict[str, Plain]] = {}
    earlier_looks: int = 0

    def leaks_when(self, metric: str) -> Direction:
        return leaks_when(metric, self.metrics)

    def defense_settings(self, defense: str, track: Track = "diagnostic") -> dict[str, Plain]:
        """The settings of a defense in a track, else in another one; empty if they are not known."""
        names = (training_name(each, defense) for each in (track, "diagnostic", "production"))
        return next((self.defenses[name] for name in names if name in self.defenses), {})


class Round(Record):
    """One round of training. bytes_up, bytes_down: sent by and to all clients. failures: the reason, by client.

    flags: what was unusual about an update that was used, by client.
    train_loss, client: measured by the clients; a server on Flower does not receive them. Budgets and losses may be
    infinite, written as Infinity.
    """

    round: int
    accuracy: float | None = None
    loss: float | None = None
    seconds: float
    bytes_up: int
    bytes_down: int
    clients: int
    failures: dict[str, str] = {}
    flags: dict[str, str] = {}
    learning_rate: float
    train_loss: float | None = None
    client: dict[str, float] = {}


class Final(Record):
    """The test scores after the last round."""

    accuracy: float | None
    loss: float | None


class DefenseCost(Record):
    """The cost of a defense in the clients' time, and its settings; other fields are figures that it reports."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)
    kind: str
    settings: dict[str, Plain] = {}
    share_of_time: float | None = None
    seconds_per_step: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The figures that the defense reports, by name."""
        return dict(self.__pydantic_extra__)


class TrainingSummary(Record):
    """`summary.json` of a training run. model_digest: a hash of every byte of the final weights."""

    schema_version: Version
    run: str
    rounds: tuple[Round, ...] = Field(min_length=1)
    final: Final
    defense: DefenseCost
    seconds: float
    model_digest: str


class Environment(Record):
    """`environment.json`: what a result depends on besides its config. packages: their versions."""

    python: str = ""
    platform: str = ""
    processor: str = ""
    packages: dict[str, str] = {}
    command: tuple[str, ...] = ()


T = TypeVar("T", bound=Record)


def parse(kind: type[T], text: str | bytes, source: str) -> T:
    """A document from its JSON. source: the file (and line) that errors name."""
    try:
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ResultsError(f"{source}: {first_fault(error)}; restore the file, or run it again") from error


def first_fault(error: ValidationError) -> str:
    """The first wrong field, what was expected, and its value if short."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    expected = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    shown = place and first["type"] != "missing" and len(str(given)) < 80
    return f"{f'{place}: ' if place else ''}{expected}{f', got {as_written(given)}' if shown else ''}"


def leaks_when(metric: str, notes: Mapping[str, MetricNote]) -> Direction:
    """Whether high or low scores of a metric leak. notes: the `metrics` of a result file.

    >>> leaks_when("grnn_mae", {}), leaks_when("my_error", {"my_error": MetricNote(leaks_when="low")})
    ('low', 'low')
    """
    if metric in notes:
        return notes[metric].leaks_when
    return "low" if metric in _LOW_LEAKS else "high"


def faults_of(trials: Iterable[Trial]) -> Counter[Fault]:
    """The number of trials that are not valid, by reason."""
    return Counter(trial.fault for trial in trials if trial.fault is not None)


def severity(word: Word) -> int:
    """0 for the most severe verdict."""
    return WORDS.index(word)


def training_name(track: Track, defense: str) -> str:
    """The name of a defense's federation, in `Summary.training_failed` and for readers."""
    return f"{defense} (production)" if track == "production" else defense


def settings_by_defense(trials: Iterable[TrialHead]) -> dict[str, dict[str, Plain]]:
    """The settings of the defenses of these trials, for `Summary.defenses`."""
    return {training_name(each.track, each.defense): each.defense_settings for each in trials}


def common_ledger(trials: Iterable[Trial]) -> Ledger:
    """The conditions of all attacks; "varies" where they differ."""
    found = [trial.ledger.facts() for trial in trials if trial.role == "attack" and trial.ledger.facts()]
    first = found[0] if found else {}
    same = {key: all(key in other and other[key] == value for other in found) for key, value in first.items()}
    return Ledger.model_validate({key: value if same[key] else VARIES for key, value in first.items()})


def metrics_of(trials: Iterable[Trial]) -> dict[str, MetricNote]:
    """The notes of all metrics of these trials."""
    return {name: note for trial in trials for name, note in trial.metrics.items()}


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None if there are none.

    >>> mean([1.0, None, 3.0])
    2.0
    """
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
