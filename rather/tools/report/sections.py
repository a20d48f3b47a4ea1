"""The sections of a report: curves, findings, answers, data, cost, incidents, settings, machine."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from rather.config.values import FORGETTING, WIN_RATE
from rather.data.findings import BARS, bar_labels
from rather.data.show import report_rows, side_name, unit_of
from rather.files import JsonObject
from rather.outcome.result import accuracy_of, judge_accuracy, judged_prefix, result_lines
from rather.run_folder.names import ANSWERS, CONFIG, DATA_REPORT, REPORT_PAGE, STARTS
from rather.tools.report.folder import Folder, MetricColumns
from rather.tools.report.page import LEVELS, chart, escape, line, page, slug, table
from rather.tools.report.pairs import MEANINGS, Doctor, PairHistory
from rather.tracking.health import urgency
from rather.tracking.json_lines import LEDGER, held_out_prefix
from rather.tracking.outcome import outcome_text

log = logging.getLogger(__name__)

MOST_ANSWERS, MOST_INCIDENTS = 12, 200
MOST_SUSPECTS = 20
COMPUTING = ("torch", "transformers", "tokenizers", "peft", "numpy")
MISSING = f"<p>{STARTS} is missing.</p>"
TILES = (("rewards/accuracies", "accuracy", ".1%"), ("rewards/margins", "margin", ".3g"))
STATISTICS = {
    "tokens": ("Length of answers", "Mean tokens of the answers to eval_prompts."),
    "repetition": (
        "Repetition in answers",
        "Share of four-token sequences that occurred before in the same answer.",
    ),
    "ended": ("Answers that end", "Share of answers that end by themselves, before the limit."),
}
TIMES = {"time/train": "training", "time/reference": "reference", "time/wait": "waiting"}
STYLE = """<style>
.tokens mark, .tokens del, .tokens ins { color: inherit; border-radius: 3px; text-decoration: none;
} .tokens mark { background: color-mix(in srgb, var(--series-3) 25%, transparent); }
.tokens del { background: color-mix(in srgb, var(--series-2) 30%, transparent); }
.tokens ins { background: color-mix(in srgb, var(--series-1) 30%, transparent); }
pre.tokens > * { border-right: 1px solid var(--line); }
</style>"""


AXES: dict[str, JsonObject] = {
    "": {},
    "share": {"range": [0, 1], "percent": True},
    "correlation": {"range": [-1, 1]},
}
# Name, metrics (two for chosen and rejected), description, and axis of each chart.
CURVES = """\
Loss | loss | Mean over {unit}. Held-out rising while training falls means memorising.
Accuracy | rewards/accuracies | Share of pairs whose chosen answer has the greater reward; a tie \
counts as 0. | share
Margin | rewards/margins | Reward of the chosen minus reward of the rejected answer.
Rewards | rewards/chosen rewards/rejected | Beta times the log-ratio of policy and reference.
Log-probs | logps/chosen logps/rejected | Nats of whole answers under the policy.
Baseline | baseline | What rewards are compared with: the KL of KTO, or the mean reward of BCO.
Scores | scores/mean | Mean score that the model gives.
Error of scores | scores/error | Mean distance from the scores of the data.
Chosen answers less likely than under the reference | logps/chosen_below_reference | Share of \
{unit}. Near 100 %, the margin comes from pushing both answers down. | share
Lengths | lengths/chosen lengths/rejected | Scored tokens of an answer.
Margin against length | rewards/length_correlation | Correlation of margin and length difference. \
Far above 0, the policy learns to write more. | correlation
Router loss | router_loss | Of a mixture of experts. The experts per token if all get as many \
tokens; else more.
Busiest expert | experts/max_load | Tokens of the expert with most of them, in any layer, as a \
multiple of the mean.
Idle experts | experts/idle | Share of the experts that got no token. | share
Gradient norm | grad_norm | Before clipping, in the last step of a log line.
Learning rate | lr | In the last step of a log line.
Speed | pairs_per_second | In {unit} per second, with data, reference and training.
"""
# What a curve means if rows have one answer with a label, and without log-probs.
OF_LABELS = {
    "Accuracy": "Share of answers whose reward is on their label's side of the baseline; a tie "
    "counts as 0.",
    "Margin": "Mean reward of desirable minus mean reward of undesirable answers.",
    "Chosen answers less likely than under the reference": "Share of the desirable answers. Near "
    "100 %, the margin comes from pushing all answers down.",
}
SIDES_OF_PAIRS = {"chosen": "chosen", "rejected": "rejected"}
SIDES_OF_LABELS = {"chosen": "desirable", "rejected": "undesirable"}
OF_REWARD_MODELS = {"Rewards": "Mean scores of the model."}


def held_out_sets(columns: MetricColumns) -> dict[str, str]:
    """Return the names of the evaluation sets by the prefix of their metrics: eval/[<name>/]."""
    prefixes = sorted(filter(None, map(held_out_prefix, columns)))
    return {prefix: f"held-out {prefix[5:-1]}".strip() for prefix in prefixes}


def verdict(run: Folder, state: str) -> str:
    """Return one sentence: was it worth it?"""
    metrics = {name: column.values for name, column in run.metrics.items()}
    judged = judged_prefix(metrics)
    if judged is None:
        return ""
    answer, reason = judge_accuracy(metrics, run.data, judged)
    if FORGETTING + "loss" in metrics or WIN_RATE in metrics:
        reason = " ".join(result_lines(metrics, run.data))
    serious_findings = [entry for entry in run.health if entry["severity"] == "serious"]
    serious = sorted({entry["name"] for entry in serious_findings})
    if serious:
        noun = "finding" if len(serious) == 1 else "findings"
        reason += f" Health has {len(serious)} serious {noun}: "
        reason += f"{', '.join(serious)}."
        answer = "Perhaps" if answer == "Yes" else answer
    level = {"Yes": "good", "Perhaps": "warn", "Not shown": "warn"}.get(answer, "bad")
    when = "So far" if state == "running" else "Was it worth it?"
    return (
        f'<p class="verdict">{when} <strong class="{level}">{answer}.</strong> {escape(reason)}</p>'
    )


def tiles(run: Folder, state: str) -> str:
    """Return the numbers that a reader looks for first, each with a note below it."""
    total = f" of {run.total_steps}" if run.total_steps else ""
    shown = {"State": (state, ""), "Steps": (f"{run.step}{total}", "")}
    for prefix, name in list(held_out_sets(run.metrics).items())[:3]:
        ties = run.metrics.get(prefix + "rewards/ties")
        for metric, metric_name, form in TILES:
            if column := run.metrics.get(prefix + metric):
                first, last = f"{column.values[0]:{form}}", f"{column.values[-1]:{form}}"
                notes = []
                if metric_name == "accuracy":
                    values = {
                        key: metric_column.values for key, metric_column in run.metrics.items()
                    }
                    _, _, low, high = accuracy_of(values, prefix)
                    notes.append(f"95 %: {low:.1%} to {high:.1%}")
                    if ties and ties.values[0] == 1:
                        first = "all ties"  # policy and reference are equal before the first step
                if len(column.values) > 1:
                    notes.append(f"before: {first}")
                shown[f"{name.capitalize()} {metric_name}"] = (last, "; ".join(notes))
    shown[f"{unit_of(run.data).capitalize()} trained on"] = (f"{run.total('pairs'):,.0f}", "")
    shown["Time in steps"] = (_time(sum(seconds for _, seconds in _timed(run))), "")
    items = ""
    for key, (text, note) in shown.items():
        items += f"<div><dt>{escape(key)}</dt><dd>{escape(text)}</dd>"
        items += f'<dd class="note">{escape(note)}</dd></div>' if note else "</div>"
    return f"{verdict(run, state)}<dl class='tiles'>{items}</dl>"


def curves(run: Folder) -> str:
    """Return charts with training and held-out sets in their colours; rejected is dashed."""
    sets, charts = {"": "training", **held_out_sets(run.metrics)}, []
    is_labelled = run.data.get("rows") == "labelled"
    sides = SIDES_OF_LABELS if is_labelled else SIDES_OF_PAIRS
    texts = dict(OF_LABELS) if is_labelled else {}
    texts |= {} if "logps/chosen" in run.metrics else OF_REWARD_MODELS
    for row in CURVES.splitlines():
        name, metrics, text, axis = (*row.split(" | "), "")[:4]
        text = texts.get(name, text).format(unit=unit_of(run.data))
        series = []
        for number, (prefix, label) in enumerate(sets.items()):
            for metric in metrics.split():
                if prefix + metric not in run.metrics:
                    continue
                side = metric.rpartition("/")[2]
                line_name = f"{label}, {sides[side]}" if side in sides else label
                style = {"colour": number % 8 + 1, "dashed": side == "rejected"}
                # Held-out points are few: a dot shows where one was measured.
                points = run.metrics[prefix + metric]
                series.append(line(line_name, points, dots=bool(prefix), **style))
        if series:
            charts.append(chart(name, text, series, **AXES[axis]))
    charts += _expert_loads(run)
    return _grid(charts) if charts else "<p>No step has been logged yet.</p>"


def _expert_loads(run: Folder) -> list[str]:
    """Return a chart of the tokens of each expert; none without experts."""
    loads = {name.rpartition("/")[2]: run.metrics[name].values[-1]
             for name in run.metrics if name.startswith("experts/load/")}  # fmt: skip
    if not loads:
        return []
    series = [{"name": "tokens", "x": list(loads), "y": list(loads.values())}]
    text = "Tokens of each expert over all layers, as a multiple of the mean; the last line."
    return [chart("Load of the experts", text, series, x="expert", bars=True)]


def _grid(parts: Iterable[str]) -> str:
    return f'<div class="grid">{"".join(parts)}</div>'


def health(run: Folder) -> str:
    outcome = outcome_text(run.times)
    cards = f"<p>Outcome: {escape(outcome)}.</p>" if outcome else ""
    if not run.health:
        return f"{cards}<p>No problems found.</p>"
    finding_cards = []
    findings = sorted(run.health, key=lambda entry: urgency(entry["name"], entry["severity"]))
    for finding in findings:
        fields = {name: escape(finding[name]) for name in ("step", "name", "text", "advice")}
        severity = escape(finding["severity"])
        card = (
            '<div class="card"><h3><span class="{level}">{severity}</span>: {name}, from step '
            '{step}</h3><p class="finding">{text}</p><p class="muted">{advice}</p></div>'
        ).format(level=LEVELS.get(severity, "muted"), severity=severity, **fields)
        finding_cards.append(card)
    return cards + _grid(finding_cards)


def answers(run: Folder) -> str:
    """Return the newest answer of the policy to each prompt next to that of the reference."""
    if not run.answers:
        return ""
    charts = []
    for metric, (name, text) in STATISTICS.items():
        names = {who: f"eval/answers/{who}/{metric}" for who in ("policy", "reference")}
        series = [line(who, run.metrics[key]) for who, key in names.items() if key in run.metrics]
        charts += [chart(name, text, series)] if series else []
    newest = list({answer["prompt"]: answer for answer in run.answers}.values())
    cards = ""
    for answer in newest[:MOST_ANSWERS]:
        after, sides = f"After: the policy at step {answer['step']}", []
        for side, name in (("reference", "Before: the reference"), ("policy", after)):
            stats = answer[f"{side}_stats"]
            ended = "ended by itself" if stats["ended"] else "cut at the limit"
            about = f"{stats['tokens']} tokens, {ended}, repetition {stats['repetition']:.2f}"
            sides.append(
                f'<div><h4>{escape(name)}</h4><p class="answer">{escape(answer[side])}</p>'
                f'<p class="muted">{escape(about)}</p></div>'
            )
        heading = f"<h3>{escape(answer['prompt'])}</h3>"
        cards += f'<article class="card">{heading}{_grid(sides)}</article>'
    if (hidden := len(newest) - MOST_ANSWERS) > 0:
        cards += f"<p class='muted'>{hidden} more prompts are in {ANSWERS}.</p>"
    return cards + _grid(charts)


def time_and_cost(run: Folder) -> str:
    timed, tokens = list(_timed(run)), run.total("tokens")
    seconds = sum(spent for _, spent in timed)
    device_seconds = sum(spent * _devices(run, step) for step, spent in timed)
    rows: list[tuple[object, ...]] = [
        ("Time in steps", _time(seconds)),
        ("Devices", _devices(run)),
        ("Device-hours in steps", device_seconds / 3600),
        (unit_of(run.data).capitalize(), int(run.total("pairs"))),
        ("Tokens", int(tokens)),
    ]
    if seconds:
        rows.append(("Tokens per second", tokens / seconds))
    if memory := run.times.get("peak_memory_bytes"):
        rows.append(("Peak memory of the driver's device", f"{memory / 2**30:.2f} GiB"))
    caption = "Cost of all steps in metrics.jsonl; a shared prompt counts once"
    text = table(caption, ["what", "amount"], rows) + _forecast(run.plan)
    phases, total = run.times.get("parts", {}), run.times.get("seconds", 0.0)
    if phases and total:  # they follow one another
        phases = {**phases, "everything else": max(0.0, total - sum(phases.values()))}
        rows = [(name, _time(spent), f"{spent / total:.1%}") for name, spent in phases.items()]
        caption = f"The last start took {_time(total)} from its first step"
        text += table(caption, ["part", "time", "share"], rows)
    series = [line(name, run.metrics[key]) for key, name in TIMES.items() if key in run.metrics]
    if series:
        about = "Means of each log line. A reference on its own devices works in parallel with "
        text += chart("Time of a step", f"{about}training.", series, y="seconds per step")
    return text


def _forecast(plan: JsonObject) -> str:
    """Return the forecast next to what was measured."""
    if "measured" not in plan:
        return ""
    measured, error = plan["measured"], plan["error"]
    memory = (plan["memory_bytes"]["total"] / 2**30, measured["memory_bytes"] / 2**30)
    time = (plan["seconds_per_step"], measured["seconds_per_step"])
    forecasts = {"memory": ("memory in GiB", *memory), "time": ("seconds per step", *time)}
    rows = [
        (*row, f"{error[key]:+.0%}") for key, row in forecasts.items() if error[key] is not None
    ]
    headings = ["what", "forecast", "measured", "off by"]
    return table("Forecast and measurement", headings, rows) if rows else ""


def incidents(run: Folder) -> str:
    if not run.incidents:
        return "<p>None.</p>"
    rows = []
    for facts in run.incidents[-MOST_INCIDENTS:]:
        usual = {name: str(facts.get(name, "")) for name in ("time", "kind", "step")}
        facts_left = [f"{name}: {_text(fact)}" for name, fact in facts.items() if name not in usual]
        rows.append([*usual.values(), ", ".join(facts_left)])
    caption = f"Problems that the run survived: the last {len(rows)} of {len(run.incidents)}"
    return table(caption, ["time", "what", "step", "facts"], rows)


def settings(run: Folder) -> str:
    if not run.starts:
        return MISSING
    rows = [
        (path, _text(setting["value"]), _text(setting["default"]), setting["from"])
        for path, setting in run.starts[-1]["settings"].items()
    ]
    return table("Keys that differ from their defaults", ["key", "value", "default", "from"], rows)


def machine(run: Folder) -> str:
    if not run.starts:
        return MISSING
    newest = [(name, str(fact)) for name, fact in run.starts[-1]["environment"].items()]
    rows = [(start["time"], str(start["step"]), start["command"]) for start in run.starts]
    return table("The last start", ["what", "found"], newest) + table(
        "Starts of this run", ["time", "steps done before", "command"], rows
    )


def reproduce(run: Folder) -> str:
    """Return a command that needs only the folder: its config.yaml holds every value, resolved."""
    newest: JsonObject = {"launcher": "rather", "environment": {}, "settings": {}}
    newest |= run.starts[-1] if run.starts else {}
    command = shlex.join(["train", str(run.path / CONFIG), f"exp_name={run.name}-again"])
    text = (
        "<p>Run it again in a new folder, from the same working directory:</p>"
        f"<pre>{escape(newest['launcher'])} {escape(command)}</pre>"
    )
    versions = newest["environment"]
    if pins := " ".join(f"{name}=={versions[name]}" for name in COMPUTING if name in versions):
        text += (
            f"<p>With the same versions of what computes:</p><pre>pip install {escape(pins)}</pre>"
        )
    values = [{key: x["value"] for key, x in start["settings"].items()} for start in run.starts]
    changed = {
        key
        for values_of_start in values
        for key in {**values_of_start, **values[-1]}
        if values_of_start.get(key) != values[-1].get(key)
    }
    if changed:
        return text + (
            f"<p>{escape(', '.join(sorted(changed)))} was changed when the run was resumed, so "
            "this command alone does not give the same numbers: repeat the starts above, one after "
            "the other.</p>"
        )
    return text + (
        "<p>The result is bit-identical on a CPU, and on a GPU with <code>deterministic: "
        "true</code>.</p>"
    )


def _timed(run: Folder) -> Iterator[tuple[int, float]]:
    """Yield the step of each log line and its seconds, from its pairs and their speed."""
    pairs, speed = run.metrics.get("pairs"), run.metrics.get("pairs_per_second")
    if pairs and speed:
        for step, count, fast in zip(speed.steps, pairs.values, speed.values, strict=False):
            if fast > 0:
                yield step, count / fast


def _devices(run: Folder, step: int | None = None) -> int:
    """Return the devices of the last start, or of the one that did a step: they may differ."""
    fitting = [start for start in run.starts if step is None or start["step"] < step]
    starts = fitting[-1:] or run.starts[:1]
    return int(starts[0]["environment"]["devices"]) if starts else 1


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- the data report, also for `rather data --html` ---


def data_page(report: JsonObject, name: str) -> str:
    """Return a whole document."""
    body = f'<h2 id="data">What the model will see</h2>{data_section(report)}'
    return page(f"Data of {name}", body)


def data(run: Folder) -> str:
    return data_section(run.data) if run.data else f"<p>{DATA_REPORT} is missing.</p>"


def data_section(report: JsonObject) -> str:
    """Return the body without a heading. Data that was refused has only its table of rows."""
    text = STYLE
    if look := report.get("look"):
        lengths = look["sets"]["train"]["lengths"]
        unit, prompts = unit_of(report), {"prompts": lengths["prompt"]}
        sides = {side_name(side, unit): lengths[side] for side in lengths if side != "prompt"}
        text += _data_findings(look["findings"], report["warnings"]) + "<h3>Lengths</h3>"
        charts = (
            ("Prompt lengths", "the tokens of their prompt", prompts),
            ("Answer lengths", "the tokens of each answer", sides),
        )
        text += _grid(_bar_chart(unit, *chart_parts) for chart_parts in charts)
    rows = []
    for set_name, label, count, note, _ in report_rows(report):
        rows.append((f"{set_name}: {label}", count, note))
    text += "<h3>Rows</h3>" + table("What became of the rows", ["what", "count", "detail"], rows)
    return text + _pairs(report.get("shown", []), unit_of(report))


def _data_findings(findings: Sequence[JsonObject], warnings: Sequence[str]) -> str:
    if not findings and not warnings:
        return "<p>No problems found.</p>"
    items = [(finding["severity"], finding["text"], finding["advice"]) for finding in findings]
    items += [("warning", text, "") for text in warnings]
    lines = "".join(
        f'<li><strong class="{LEVELS[severity]}">{escape(severity)}</strong> {escape(text)} '
        f'<span class="muted">{escape(advice)}</span></li>'
        for severity, text, advice in items
    )
    return f"<h3>Findings</h3><ul>{lines}</ul>"


def _bar_chart(unit: str, name: str, what: str, spreads: Mapping[str, JsonObject]) -> str:
    series = [
        {"name": side, "x": bar_labels(spread), "y": spread["counts"]}
        for side, spread in spreads.items()
    ]
    text = f"Training {unit} by {what}."
    return chart(name, text, series, x="tokens", y=unit, bars=True)


def _mark(token: str, tag: str) -> str:
    return f"<{tag}>{escape(token)}</{tag}>"


def _pairs(pairs: Sequence[JsonObject], unit: str) -> str:
    title = f"<h3>{unit.capitalize()} as tokens</h3>"
    text = f"{title}<p>Scored tokens are <mark>marked</mark>.</p>" if pairs else ""
    for pair in pairs:
        sides = []
        for name, side in pair["sides"].items():
            shown, hidden = side["shown"], side["tokens"] - len(side["shown"])
            tokens = "".join(_mark(token, "mark" if marked else "span") for token, marked in shown)
            suffix = f" and {hidden} more tokens" if hidden else ""
            heading = f"{escape(name)}: {side['tokens']} tokens, {side['scored']} scored"
            sides.append(f'<div><h5>{heading}</h5><pre class="tokens">{tokens}{suffix}</pre></div>')
        text += f'<article class="card"><h4>{escape(pair["name"])}</h4>{_grid(sides)}</article>'
    return text


# --- what the ledger says about the pairs ---


def pairs(run: Folder) -> str:
    if not (run.path / LEDGER).exists():
        return ""
    doctor = Doctor.of(run.path)
    numbers = doctor.summary()
    counts = [(name.replace("_", " "), numbers[name], text) for name, text in MEANINGS.items()]
    by_length = f"{numbers['explained_by_length']:.0%}"
    counts.append(("explained by length", by_length, "R^2 of margins"))
    text = f"<p>{escape(doctor.conclusion)}</p>"
    if calibration := doctor.calibration:
        text += (
            f"<p>Planted flips: AUC {calibration['auc']:.2f}; the cut finds "
            f"{calibration['recall']:.0%} of them, and at least {calibration['precision']:.0%} of "
            "what it finds is wrong.</p>"
        )
    summary = table("What training says about its pairs", ["finding", "pairs", "meaning"], counts)
    text += _grid([summary, _margins_chart(doctor.history)])
    return (
        text
        + _suspects(run, doctor.rows()[:MOST_SUSPECTS])
        + (
            "<p class='muted'>To read them token by token, open the board and search its pair "
            "inspector for an id, or for <code>likely_flipped</code> or <code>disagrees</code>.</p>"
        )
    )


def _margins_chart(history: PairHistory) -> str:
    """Return a histogram of margins; after one epoch, first and last seen are the same."""
    margins = {"first seen": history.first}
    about = "Pairs by their margin when first seen."
    if history.visits.max() > 1:
        margins["last seen"] = history.last
        about = "Pairs by their margin when first seen, and when last seen."
    edges = np.histogram_bin_edges(np.concatenate([*margins.values()]), BARS)
    # Labels are categories: with too few digits, two bars would fall on one.
    digits = 2 + int(np.log10(BARS * abs(edges).max() / (edges[-1] - edges[0])))
    middles = [f"{middle:.{digits}g}" for middle in (edges[1:] + edges[:-1]) / 2]
    series = [
        {"name": name, "x": middles, "y": np.histogram(values, edges)[0].tolist()}
        for name, values in margins.items()
    ]
    axes = {"x": "margin, without beta", "y": "pairs"}
    return chart("Margins of the pairs", about, series, bars=True, **axes)


def _suspects(run: Folder, rows: Sequence[JsonObject]) -> str:
    """Return the pairs with the highest flip score, with their texts if they are known."""
    texts = run.texts_of([int(row["id"], 16) for row in rows])
    heads = ["id", "flip score", "margin first seen", "last", "findings"]
    cells = []
    for row in rows:
        numbers = [f"{row[name]:.3g}" for name in ("flip_score", "first", "last")]
        findings = ", ".join(row["findings"]).replace("_", " ")
        cells.append([row["id"], *numbers, findings])
    if texts:
        heads += ["prompt", "chosen", "rejected"]
        for row, line in zip(rows, cells, strict=True):
            pair = texts.get(int(row["id"], 16), {})
            line += [pair.get(side, "") for side in ("prompt", "chosen", "rejected")]
    return table("The pairs with the highest flip score", heads, cells)


# --- the page ---

SECTIONS: dict[str, Callable[[Folder], str]] = {
    "Health": health,
    "Answers before and after": answers,
    "Curves": curves,
    "Data": data,
    "Pairs": pairs,
    "Time and cost": time_and_cost,
    "Incidents": incidents,
    "Settings": settings,
    "Machine": machine,
    "Reproduce this run": reproduce,
}


def report_page(run: Folder, state: str) -> str:
    """Return the page; a damaged file costs only the part that shows it."""
    body, state = "", "finished" if run.finished else state
    sections = {"": lambda run: tiles(run, state), **SECTIONS}
    for title, section in sections.items():
        try:
            text = section(run)
        except Exception as error:
            log.debug("a part of %s cannot be shown", REPORT_PAGE, exc_info=True)
            text = (
                '<p class="bad">A file of the run folder is damaged, so this cannot be shown '
                f"({escape(f'{type(error).__name__}: {error}')}).</p>"
            )
        if title and text:
            anchor = slug(title)
            heading = f'<h2 id="{anchor}">{title}</h2>'
            text = f'<section aria-labelledby="{anchor}">{heading}{text}</section>\n'
        body += text
    return page(run.name, body)
