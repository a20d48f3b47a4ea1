"""The other parts of the report: findings, answers, data, time and cost, incidents, settings, machine, again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from rather.report import escape, table
from rather.report.curves import answer_curves, held_out, step_times, told_set
from rather.report.data_page import section as data_section
from rather.report.folder import ANSWERS, Folder
from rather.run_folder.layout import STARTS

MOST_ANSWERS, MOST_INCIDENTS = 12, 200
LEVELS = {"serious": "bad", "warning": "warn", "info": "muted"}
COMPUTING = ("torch", "transformers", "tokenizers", "peft", "numpy")
MISSING = f"<p>{STARTS} is missing.</p>"


def tiles(run: Folder, state: str) -> str:
    """The numbers that one looks for first."""
    of_all = f" of {run.total_steps}" if run.total_steps else ""
    shown = {"State": state, "Steps": f"{run.step}{of_all}"}
    for prefix in held_out(run.metrics)[:3]:
        for metric, told, form in (
            ("rewards/accuracies", "accuracy", ".1%"),
            ("rewards/margins", "margin", ".3g"),
        ):
            if column := run.metrics.get(prefix + metric):
                shown[f"{told_set(prefix).capitalize()} {told}"] = _change(column.values, form)
        ties = run.metrics.get(prefix + "rewards/ties")
        if ties and ties.values[0] == 1:  # policy and reference are equal before the first step
            name = f"{told_set(prefix).capitalize()} accuracy"
            shown[name] = shown[name].replace("0.0%", "all ties", 1)
    shown["Pairs trained on"] = f"{run.total('pairs'):,.0f}"
    shown["Time in steps"] = _time(seconds_in_steps(run))
    return (
        "<dl class='tiles'>"
        + "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in shown.items()
        )
        + "</dl>"
    )


def health(run: Folder) -> str:
    if not run.health:
        return "<p>Nothing to remark.</p>"
    order = [*LEVELS, ""]
    found = sorted(
        run.health,
        key=lambda each: order.index(each["severity"] if each["severity"] in LEVELS else ""),
    )
    return "".join(map(_finding, found))


def _finding(found: Mapping[str, Any]) -> str:
    severity, step, name, text, advice = (
        escape(found[key]) for key in ("severity", "step", "name", "text", "advice")
    )
    return (
        f'<div class="card"><h3><span class="{LEVELS.get(severity, "muted")}">{severity}</span>: {name}, '
        f'from step {step}</h3><p>{text}</p><p class="muted">{advice}</p></div>'
    )


def answers(run: Folder) -> str:
    """The newest answer of the policy to each prompt beside that of the reference."""
    if not run.answers:
        return ""
    newest = {each["prompt"]: each for each in run.answers}
    shown = list(newest.values())[:MOST_ANSWERS]
    more = len(newest) - len(shown)
    left_out = f"<p class='muted'>{more} more prompts are in {ANSWERS}.</p>" if more else ""
    return answer_curves(run.metrics) + "".join(map(_both_answers, shown)) + left_out


def _both_answers(each: Mapping[str, Any]) -> str:
    before = _answer("Before: the reference", each["reference"], each["reference_stats"])
    after = _answer(
        f"After: the policy at step {each['step']}", each["policy"], each["policy_stats"]
    )
    return f'<article class="card"><h3>{escape(each["prompt"])}</h3><div class="grid">{before}{after}</div></article>'


def _answer(name: str, text: str, stats: Mapping[str, Any]) -> str:
    ended = "ended by itself" if stats["ended"] else "cut at the limit"
    told = f"{stats['tokens']} tokens, {ended}, repetition {stats['repetition']:.2f}"
    return f'<div><h4>{escape(name)}</h4><pre>{escape(text)}</pre><p class="muted">{escape(told)}</p></div>'


def data(run: Folder) -> str:
    return data_section(run.data) if run.data else "<p>data_report.json is missing.</p>"


def time_and_cost(run: Folder) -> str:
    seconds, devices = seconds_in_steps(run), _devices(run)
    device_seconds = sum(spent * _devices(run, step) for step, spent in _timed(run))
    rows: list[tuple[object, ...]] = [
        ("Time in steps", _time(seconds)),
        ("Devices", devices),
        ("Device-hours in steps", device_seconds / 3600),
        ("Pairs", int(run.total("pairs"))),
        ("Tokens", int(run.total("tokens"))),
    ]
    if seconds:
        rows.append(("Tokens a second", run.total("tokens") / seconds))
    if memory := run.times.get("peak_memory_bytes"):
        rows.append(("Peak memory of the driver's device", f"{memory / 2**30:.2f} GiB"))
    cost = table(
        "Cost of all steps in metrics.jsonl; a shared prompt counts once", ["what", "amount"], rows
    )
    return cost + _forecast(run) + _last_start(run) + step_times(run.metrics)


def _forecast(run: Folder) -> str:
    """What was said beforehand beside what came."""
    if "measured" not in run.plan:
        return ""
    measured, off = run.plan["measured"], run.plan["error"]
    numbers = {
        "memory in GiB": (
            run.plan["memory_bytes"]["total"] / 2**30,
            measured["memory_bytes"] / 2**30,
            off["memory"],
        ),
        "seconds a step": (run.plan["seconds_per_step"], measured["seconds_per_step"], off["time"]),
    }
    rows = [
        (name, said, came, f"{error:+.0%}")
        for name, (said, came, error) in numbers.items()
        if error is not None
    ]
    return (
        table("Forecast against measured", ["what", "forecast", "measured", "off by"], rows)
        if rows
        else ""
    )


def _last_start(run: Folder) -> str:
    """The driver's clock: parts that it does one after another."""
    parts = run.times.get("parts", {})
    whole = run.times.get("seconds", 0.0)
    if not parts or not whole:
        return ""
    rest = max(0.0, whole - sum(parts.values()))
    rows = [
        (name, _time(each), f"{each / whole:.1%}")
        for name, each in {**parts, "everything else": rest}.items()
    ]
    return table(
        f"The last start took {_time(whole)} from its first step", ["part", "time", "share"], rows
    )


def incidents(run: Folder) -> str:
    if not run.incidents:
        return "<p>None.</p>"
    usual = ("time", "kind", "step")
    rows = [
        (each.get("time", ""), each.get("kind", ""), str(each.get("step", "")),
         ", ".join(f"{name}: {_short(fact)}" for name, fact in each.items() if name not in usual))
        for each in run.incidents[-MOST_INCIDENTS:]
    ]  # fmt: skip
    told = f"What went wrong and was survived: the last {len(rows)} of {len(run.incidents)}"
    return table(told, ["time", "what", "step", "facts"], rows)


def settings(run: Folder) -> str:
    if not run.starts:
        return MISSING
    rows = [
        (path, _short(each["value"]), _short(each["default"]), each["from"])
        for path, each in run.starts[-1]["settings"].items()
    ]
    return table("Keys that differ from their defaults", ["key", "value", "default", "from"], rows)


def machine(run: Folder) -> str:
    if not run.starts:
        return MISSING
    newest = run.starts[-1]["environment"]
    parts = [
        table(
            "The last start",
            ["what", "found"],
            [(name, str(value)) for name, value in newest.items()],
        )
    ]
    rows = [(each["time"], str(each["step"]), each["command"]) for each in run.starts]
    parts.append(table("Starts of this run", ["time", "steps done before", "command"], rows))
    return "".join(parts)


def again(run: Folder) -> str:
    """From the folder alone: config.yaml holds every value, resolved."""
    newest: dict[str, Any] = (
        run.starts[-1] if run.starts else {"launcher": "rather", "environment": {}, "settings": {}}
    )
    command = shlex.join(["train", str(run.path / "config.yaml"), f"exp_name={run.name}-again"])
    parts = [
        "<p>The same run in a folder of its own, from where it was started:</p>",
        f"<pre>{escape(newest['launcher'])} {escape(command)}</pre>",
    ]
    if pins := [
        f"{name}=={newest['environment'][name]}"
        for name in COMPUTING
        if name in newest["environment"]
    ]:
        parts.append(
            f"<p>With the same versions of what computes:</p><pre>pip install {escape(' '.join(pins))}</pre>"
        )
    if changed := sorted(
        {path for start in run.starts for path in _changed(start["settings"], newest["settings"])}
    ):
        parts.append(
            f"<p>{escape(', '.join(changed))} was changed when the run was resumed, so this command alone does not "
            "give the same numbers: the starts above do, one after the other.</p>"
        )
    else:
        parts.append(
            "<p>The same bits come out on a CPU, and on a GPU with <code>deterministic: true</code>.</p>"
        )
    return "".join(parts)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for path in before.keys() | now.keys():
        if before.get(path, {}).get("value") != now.get(path, {}).get("value"):
            yield path


def seconds_in_steps(run: Folder) -> float:
    """Over all starts."""
    return sum(spent for _, spent in _timed(run))


def _timed(run: Folder) -> Iterator[tuple[int, float]]:
    """The step of each log line and the seconds that it stands for: it tells its pairs and their speed."""
    pairs, speed = run.metrics.get("pairs"), run.metrics.get("pairs_per_second")
    if pairs and speed:
        for step, count, fast in zip(speed.steps, pairs.values, speed.values, strict=False):
            if fast > 0:
                yield step, count / fast


def _devices(run: Folder, step: int | None = None) -> int:
    """Of the last start, or of the one that did a step: resumed, a run may have others."""
    told = (start for start in reversed(run.starts) if step is None or start["step"] < step)
    found = next(told, None) or (run.starts[0] if run.starts else None)
    return int(found["environment"]["devices"]) if found else 1


def _change(values: Any, form: str) -> str:
    first, last = values[0], values[-1]
    return (
        f"{last:{form}}"
        if len(values) == 1
        else f"{first:{form}} \N{RIGHTWARDS ARROW} {last:{form}}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
