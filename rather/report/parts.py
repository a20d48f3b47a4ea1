"""The other parts of the report: findings, answers, data, time and cost, incidents, settings,
machine, reproduction.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from rather.report import LEVELS, escape, table
from rather.report.curves import answer_curves, held_out_sets, step_times
from rather.report.data_page import section
from rather.report.folder import ANSWERS, CONFIG, DATA_REPORT, STARTS, Folder, Record

MOST_ANSWERS, MOST_INCIDENTS = 12, 200
COMPUTING = ("torch", "transformers", "tokenizers", "peft", "numpy")
MISSING = f"<p>{STARTS} is missing.</p>"
TILES = (("rewards/accuracies", "accuracy", ".1%"), ("rewards/margins", "margin", ".3g"))


def tiles(run: Folder, state: str) -> str:
    """Return the numbers that a reader looks for first."""
    total = f" of {run.total_steps}" if run.total_steps else ""
    shown = {"State": state, "Steps": f"{run.step}{total}"}
    for prefix, name in list(held_out_sets(run.metrics).items())[:3]:
        ties = run.metrics.get(prefix + "rewards/ties")
        for metric, what, form in TILES:
            if column := run.metrics.get(prefix + metric):
                first, last = (f"{value:{form}}" for value in (column.values[0], column.values[-1]))
                if what == "accuracy" and ties and ties.values[0] == 1:
                    first = "all ties"  # policy and reference are equal before the first step
                change = f"{first} \N{RIGHTWARDS ARROW} {last}" if len(column.values) > 1 else first
                shown[f"{name.capitalize()} {what}"] = change
    shown["Pairs trained on"] = f"{run.total('pairs'):,.0f}"
    shown["Time in steps"] = _time(sum(seconds for _, seconds in _timed(run)))
    items = (
        f"<div><dt>{escape(key)}</dt><dd>{escape(each)}</dd></div>" for key, each in shown.items()
    )
    return f"<dl class='tiles'>{''.join(items)}</dl>"


def health(run: Folder) -> str:
    if not run.health:
        return "<p>No problems found.</p>"
    order = list(LEVELS)
    found = sorted(run.health, key=lambda one: [*order, one["severity"]].index(one["severity"]))
    cards = ""
    for one in found:
        severity, step, name, text, advice = (
            escape(one[key]) for key in ("severity", "step", "name", "text", "advice")
        )
        level = f'<span class="{LEVELS.get(severity, "muted")}">{severity}</span>'
        cards += f'<div class="card"><h3>{level}: {name}, from step {step}</h3>'
        cards += f'<p>{text}</p><p class="muted">{advice}</p></div>'
    return cards


def answers(run: Folder) -> str:
    """Return the newest answer of the policy to each prompt next to that of the reference."""
    if not run.answers:
        return ""
    newest = list({each["prompt"]: each for each in run.answers}.values())
    cards = answer_curves(run.metrics)
    for each in newest[:MOST_ANSWERS]:
        sides = ""
        for side, name in (
            ("reference", "Before: the reference"),
            ("policy", f"After: the policy at step {each['step']}"),
        ):
            stats = each[f"{side}_stats"]
            ended = "ended by itself" if stats["ended"] else "cut at the limit"
            about = f"{stats['tokens']} tokens, {ended}, repetition {stats['repetition']:.2f}"
            sides += f"<div><h4>{escape(name)}</h4><pre>{escape(each[side])}</pre>"
            sides += f'<p class="muted">{escape(about)}</p></div>'
        prompt = escape(each["prompt"])
        cards += f'<article class="card"><h3>{prompt}</h3><div class="grid">{sides}</div></article>'
    more = len(newest) - MOST_ANSWERS
    return cards + (
        f"<p class='muted'>{more} more prompts are in {ANSWERS}.</p>" if more > 0 else ""
    )


def data(run: Folder) -> str:
    return section(run.data) if run.data else f"<p>{DATA_REPORT} is missing.</p>"


def time_and_cost(run: Folder) -> str:
    timed = list(_timed(run))
    seconds = sum(spent for _, spent in timed)
    device_seconds = sum(spent * _devices(run, step) for step, spent in timed)
    rows: list[tuple[object, ...]] = [
        ("Time in steps", _time(seconds)),
        ("Devices", _devices(run)),
        ("Device-hours in steps", device_seconds / 3600),
        ("Pairs", int(run.total("pairs"))),
        ("Tokens", int(run.total("tokens"))),
    ]
    if seconds:
        rows.append(("Tokens per second", run.total("tokens") / seconds))
    if memory := run.times.get("peak_memory_bytes"):
        rows.append(("Peak memory of the driver's device", f"{memory / 2**30:.2f} GiB"))
    caption = "Cost of all steps in metrics.jsonl; a shared prompt counts once"
    cost = table(caption, ["what", "amount"], rows)
    return cost + _forecast(run.plan) + _last_start(run.times) + step_times(run.metrics)


def _forecast(plan: Record) -> str:
    """Return the forecast next to what was measured."""
    if "measured" not in plan:
        return ""
    measured, error = plan["measured"], plan["error"]
    memory = (plan["memory_bytes"]["total"] / 2**30, measured["memory_bytes"] / 2**30)
    time = (plan["seconds_per_step"], measured["seconds_per_step"])
    rows = [
        (name, *values, f"{off:+.0%}")
        for name, values, off in (
            ("memory in GiB", memory, error["memory"]),
            ("seconds per step", time, error["time"]),
        )
        if off is not None
    ]
    headings = ["what", "forecast", "measured", "off by"]
    return table("Forecast and measurement", headings, rows) if rows else ""


def _last_start(times: Record) -> str:
    """Return where the driver's time went; its parts follow one another."""
    parts, whole = times.get("parts", {}), times.get("seconds", 0.0)
    if not parts or not whole:
        return ""
    everything = {**parts, "everything else": max(0.0, whole - sum(parts.values()))}
    rows = [(name, _time(each), f"{each / whole:.1%}") for name, each in everything.items()]
    caption = f"The last start took {_time(whole)} from its first step"
    return table(caption, ["part", "time", "share"], rows)


def incidents(run: Folder) -> str:
    if not run.incidents:
        return "<p>None.</p>"
    rows = []
    for each in run.incidents[-MOST_INCIDENTS:]:
        facts = dict(each)
        usual = [str(facts.pop(name, "")) for name in ("time", "kind", "step")]
        rows.append([*usual, ", ".join(f"{name}: {_text(fact)}" for name, fact in facts.items())])
    caption = f"Problems that the run survived: the last {len(rows)} of {len(run.incidents)}"
    return table(caption, ["time", "what", "step", "facts"], rows)


def settings(run: Folder) -> str:
    if not run.starts:
        return MISSING
    rows = [
        (path, _text(each["value"]), _text(each["default"]), each["from"])
        for path, each in run.starts[-1]["settings"].items()
    ]
    return table("Keys that differ from their defaults", ["key", "value", "default", "from"], rows)


def machine(run: Folder) -> str:
    if not run.starts:
        return MISSING
    newest = [(name, str(value)) for name, value in run.starts[-1]["environment"].items()]
    rows = [(each["time"], str(each["step"]), each["command"]) for each in run.starts]
    return table("The last start", ["what", "found"], newest) + table(
        "Starts of this run", ["time", "steps done before", "command"], rows
    )


def reproduce(run: Folder) -> str:
    """Return a command that needs only the folder: its config.yaml holds every value, resolved."""
    newest: Record = {"launcher": "rather", "environment": {}, "settings": {}}
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
    changed = {
        path
        for start in run.starts
        for path in start["settings"].keys() | newest["settings"].keys()
        if _value(start, path) != _value(newest, path)
    }
    if changed:
        return text + (
            f"<p>{escape(', '.join(sorted(changed)))} was changed when the run was resumed, so "
            "this command alone "
            "does not give the same numbers: repeat the starts above, one after the other.</p>"
        )
    return text + (
        "<p>The result is bit-identical on a CPU, and on a GPU with <code>deterministic: "
        "true</code>.</p>"
    )


def _value(start: Record, path: str) -> Any:
    return start["settings"].get(path, {}).get("value")


def _timed(run: Folder) -> Iterator[tuple[int, float]]:
    """Yield the step of each log line and its seconds, from its pairs and their speed."""
    pairs, speed = run.metrics.get("pairs"), run.metrics.get("pairs_per_second")
    if pairs and speed:
        for step, count, fast in zip(speed.steps, pairs.values, speed.values, strict=False):
            if fast > 0:
                yield step, count / fast


def _devices(run: Folder, step: int | None = None) -> int:
    """Return the devices of the last start, or of the start that did a step: a resumed run may
    have others.
    """
    fitting = [start for start in run.starts if step is None or start["step"] < step]
    found = fitting[-1:] or run.starts[:1]
    return int(found[0]["environment"]["devices"]) if found else 1


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
