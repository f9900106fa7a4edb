"""What a run's report begins with: where the time went, which ranks, what to change in the deck."""
from dataclasses import dataclass, field

import numpy as np

import advice
import simulator
import starts
from analysis import CATEGORIES, mean_step_seconds
from style import bytes_unit, number_ranges, seconds_unit, short

ARITHMETIC = ("attention", "indexing", "budget tuning", "rest of forward and backward", "optimizer")
LOSSES = {
    "planning": "making the plan",
    "ring wait": "waiting in ring attention",
    "sequence exchange": "exchanging heads for sequence",
    "pipeline transfer": "transfers between pipeline stages, waits for them included",
    "host copies": "waiting for copies to and from host memory",
    "gradient reduction": "reducing gradients, the wait for the slowest rank included",
    "data": "reading data",
    "checkpoint": "checkpoints",
    "validation": "validation",
    "other": "regions that this report does not know",
    "idle": "idle time",
}
SLOW, IDLE = 1.1, 0.5  # useful time over the mean
MOST_SHOWN = 4
WRONG_CLOCK = 1.3  # simulated and measured step differ by more


@dataclass
class Verdict:
    headline: str
    ranks: list = field(default_factory=list)  # sentences
    changes: list = field(default_factory=list)  # of advice.Change, best first
    simulator: str = ""  # what it was asked, or why it was not


def shares(a):
    """Of what lies inside steps, and of what lies between them: category -> its seconds over the
    ranks' time inside steps."""
    inside, between = (t[:, a.shown].sum(axis=(0, 1)) for t in (a.split, a.between))
    total = inside.sum()
    if total <= 0:
        return {}, {}
    return tuple(dict(zip(CATEGORIES, (s / total).tolist())) for s in (inside, between))


def judge(a, program):
    """The verdict on an analysed run; `program`: ballast, or None."""
    parts, between = shares(a)
    losses = {name: parts[name] for name in LOSSES if parts.get(name, 0) > 0}
    verdict = Verdict(_headline(a, parts, between, losses), _ranks(a))
    verdict.changes = advice.candidates(a, losses)
    if not verdict.changes:
        verdict.simulator = "No key of the deck is known to mend what is left."
    elif not program:
        verdict.simulator = (
            "The simulator was not asked, since no ballast program was found (BALLAST_PROGRAM"
            " names one): `ballast check DECK KEY=VALUE --json FILE` tells the simulated step."
        )
    else:
        _ask(a, verdict, program)
    return verdict


def _headline(a, parts, between, losses):
    steps = int(a.shown.sum())
    arithmetic = sum(parts.get(name, 0) for name in ARITHMETIC)
    text = (
        f"A step takes {duration(mean_step_seconds(a))} on its slowest rank (mean of {steps});"
        f" {percent(arithmetic)} of the ranks' time is the model's arithmetic"
    )
    if a.run.first_trace.last.device == "simulated":
        text = "Simulated, not run. " + text
    worst = sorted(losses.items(), key=lambda item: -item[1])[:3]
    worst = [f"{LOSSES[name]} {percent(share)}" for name, share in worst if share > 0.005]
    text += f". The rest: {', '.join(worst)}." if worst else ", and nothing else to speak of."
    on_top = [f"{LOSSES[n]} {percent(between[n])}" for n in LOSSES if between.get(n, 0) > 0.005]
    return text + (f" Between steps, on top of that: {', '.join(on_top)}." if on_top else "")


def _ranks(a):
    """Sentences on ranks that do more or less than the others of the same steps."""
    useful, expected = starts.expected_useful(a)
    here = expected > 0  # the others ran no step that is shown
    if here.sum() < 2:
        return []
    told, ranks, share = [], np.array(a.ranks)[here], (useful[here] / expected[here])
    worked = np.nansum(a.worked[:, a.shown], axis=1)[here]
    empty = (worked <= 0) & worked.any()
    idle, none, slow = ranks[(share < IDLE) & ~empty], ranks[empty], ranks[share > SLOW]
    if len(none):
        told.append(f"{_called(none)} computed nothing: the plan gives them no micro-batch.")
    if len(idle):
        told.append(f"{_called(idle)} computed less than half of the mean.")
    if len(slow):
        told.append(
            f"{_called(slow)} computed more than {100 * (SLOW - 1):.0f} % above the mean, at most"
            f" {100 * (share.max() - 1):.0f} % (rank {ranks[share.argmax()]}){_persistence(a)}."
        )
    if not told:
        told.append(
            f"All ranks computed alike: load balance {a.pop[0]:.3f} (mean / max of useful time)."
        )
    if cause := _coordinate(a):
        told.append(cause)
    return told


def _called(ranks):
    text = number_ranges(ranks.tolist())
    if len(text) > 60:
        text = text[:60].rsplit(",", 1)[0] + f" ... ({len(ranks)} ranks)"
    return f"Rank{'s' * (len(ranks) > 1)} {text}"


def _persistence(a):
    """Whether the same rank is the slowest in step after step."""
    shown = np.flatnonzero(a.complete)
    if len(shown) < 3:
        return ""
    slowest = np.nanargmax(a.useful[:, shown], axis=0)
    same = int((slowest == np.bincount(slowest).argmax()).sum())
    if same > 0.7 * len(shown):
        return f"; one rank is the slowest in {same} of {len(shown)} steps"
    return "; the slowest rank changes from step to step, as batches do"


def _coordinate(a):
    """The mesh coordinate that explains most of the difference between ranks, over the steps on the
    newest mesh: a rank had other coordinates on another."""
    newest = a.run.first_trace.last
    alike = [n for n in np.unique(a.session) if starts.session_of_number(a, n).mesh == newest.mesh]
    steps = np.flatnonzero(a.shown & np.isin(a.session, alike))
    traces = [a.run.traces[rank] for rank in a.ranks]
    here = np.array([trace.last.number == newest.number for trace in traces])
    useful = np.nansum(a.useful[np.ix_(here, steps)], axis=1)
    if not len(steps) or useful.max() < 1.05 * useful.mean():
        return ""
    best = ("", 0.0)
    for key, degree in newest.mesh.items():
        if degree < 2 or degree == len(useful):
            continue
        at = np.array([trace.last.at.get(key, 0) for trace, mine in zip(traces, here) if mine])
        means = np.array([useful[at == value].mean() for value in np.unique(at)])
        counts = np.array([(at == value).sum() for value in np.unique(at)])
        share = (counts * (means - useful.mean()) ** 2).sum() / (
            (useful - useful.mean()) ** 2
        ).sum()
        best = max(best, (key, float(share)), key=lambda item: item[1])
    if best[1] < 0.6:
        return ""
    return f"The difference follows {best[0]}: it explains {percent(best[1])} of it."


def _ask(a, verdict, program):
    now_s, why = simulator.Simulator(program, a.run.deck_text).judge(verdict.changes)
    if now_s is None:
        verdict.simulator = f"The simulator could not be asked: {why}."
        return
    better = [c for c in verdict.changes if (c.gain or 0) > simulator.LEAST_GAIN]
    measured_s = mean_step_seconds(a)
    off = max(measured_s, now_s) / max(min(measured_s, now_s), 1e-12)
    verdict.simulator = (
        f"By `ballast check` on this deck: {duration(now_s)} a step as it is (mean of"
        f" {simulator.STEPS}), {_answers(verdict.changes, better)}"
    )
    if off > WRONG_CLOCK:
        verdict.simulator += (
            f" Its clock is off by a factor of {off:.1f} from the {duration(measured_s)} measured:"
            " `ballast profile` measures the machine for `profile.table`; until then its gains are"
            " rough."
        )
    best = {}  # of those that set the same keys
    for change in sorted(better, key=lambda c: -c.gain):
        best.setdefault(tuple(sorted(change.settings)), change)
    verdict.changes = list(best.values())[:MOST_SHOWN]


def _answers(asked, better):
    """What came of the changes that were asked about, those without an answer apart."""
    answered = [c for c in asked if c.gain is not None]
    text = f"{len(answered)} change{'s' * (len(answered) != 1)} simulated"
    if better:
        text += f", {len(better)} faster"
    elif answered:
        text += f", none faster by more than 1 %: {_settings(answered)}"
    text += "."
    reasons = {}  # changes without an answer by the reason, in order
    for change in asked:
        if change.gain is None:
            reasons.setdefault(change.unanswered, []).append(change)
    told = "; ".join(f"{_settings(changes)} ({why})" for why, changes in reasons.items())
    return text + (f" Without an answer: {told}." if told else "")


def _settings(changes):
    return ", ".join(f"`{c.text()}`" for c in changes)


def percent(share):
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def duration(seconds):
    factor, unit = seconds_unit(seconds)
    return f"{short(seconds * factor)} {unit}"


def told(change):
    """A change with its gain, in words."""
    text = f"`{change.text()}`: {change.because}"
    if change.gain is None:
        return text
    text += (
        f". Simulated: {duration(change.step_s[0])} to {duration(change.step_s[1])} a step,"
        f" {100 * change.gain:+.0f} % tokens a second"
    )
    if max(change.bytes) > 1.05 * min(change.bytes):
        factor, unit = bytes_unit(max(change.bytes))
        now, then = (b * factor for b in change.bytes)
        text += f"; memory of the fullest rank {short(now)} to {short(then)} {unit}"
    return text


def summary(verdict):
    """Its part of metrics.json."""
    return {
        "headline": verdict.headline,
        "ranks": verdict.ranks,
        "simulator": verdict.simulator,
        "changes": [
            {"settings": c.settings, "because": c.because}
            | ({} if c.gain is None else {"simulated_gain": c.gain, "step_s": list(c.step_s)})
            for c in verdict.changes
        ],
    }


def html(verdict, escape):
    """The card at the top of a run; text between back-quotes is code."""

    def line(text):
        parts = escape(text).split("`")
        return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))

    ranks = "".join(f"<li>{line(text)}</li>" for text in verdict.ranks)
    changes = "".join(f"<li>{line(told(change))}</li>" for change in verdict.changes)
    out = f'<div class="verdict"><h3>{line(verdict.headline)}</h3>'
    if ranks:
        out += f"<h4>Ranks</h4><ul>{ranks}</ul>"
    if changes or verdict.simulator:
        out += f"<h4>What to change in the deck</h4><p>{line(verdict.simulator)}</p>"
    return out + (f"<ul>{changes}</ul>" if changes else "") + "</div>\n"
