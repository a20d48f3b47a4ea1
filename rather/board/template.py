"""The HTML skeleton of the board; board.js fills it."""

from __future__ import annotations

from rather.report import escape

COLUMNS = {
    "name": "run",
    "state": "state",
    "step": "step",
    "loss": "loss",
    "accuracy": "accuracy",
    "held_out": "held-out accuracy",
    "seconds": "took",
    "changed": "last line",
    "model": "model",
    "loss_type": "loss type",
    "notes": "notes",
}
KEYS = (
    ("/", "filter the runs"),
    ("↑ ↓", "previous or next run in the list"),
    ("Enter", "open the run; Space on its checkbox compares it"),
    ("← →", "previous or next token of an answer"),
    ("↑ ↓", "the other answer, at the same token"),
    ("n p", "next or previous pair"),
    ("?", "show this help"),
    ("Esc", "close this help"),
)


def _headings() -> str:
    button = '<th scope="col" data-key="{}"><button type="button">{}</button></th>'
    sortable = "".join(button.format(key, name) for key, name in COLUMNS.items())
    return f'<th scope="col"><span class="unseen">compare</span></th>{sortable}'


def _keys() -> str:
    rows = "".join(
        f"<dt><kbd>{escape(key)}</kbd></dt><dd>{escape(does)}</dd>" for key, does in KEYS
    )
    return f"<dl>{rows}</dl>"


BODY = f"""
<p id="status" role="status">Loading the runs.</p>

<section aria-labelledby="runs">
<h2 id="runs">Runs</h2>
<div class="tools">
<label for="filter">Filter</label>
<input id="filter" type="search" placeholder="words of name, state, model" aria-keyshortcuts="/"
autocomplete="off"> <span id="shown" class="muted"></span>
<button type="button" id="keys" aria-keyshortcuts="?">Keys</button>
</div>
<div class="scroll runs" role="region" aria-label="List of runs" tabindex="0">
<table><caption class="unseen">All runs of the folder; check the boxes of runs to compare</caption>
<thead><tr>{_headings()}</tr></thead><tbody id="rows"></tbody></table>
</div>
</section>

<section aria-labelledby="curves">
<h2 id="curves">Curves</h2>
<p id="compared" class="muted"></p>
<div class="tools"><label for="metric">Metric of the last chart</label><select
id="metric"></select></div> <div id="charts" class="grid"></div>
</section>

<section aria-labelledby="differences">
<h2 id="differences">Differences</h2>
<div id="different"></div>
</section>

<section aria-labelledby="run">
<h2 id="run">Run</h2>
<div id="opened"></div>
</section>

<section aria-labelledby="pairs">
<h2 id="pairs">Pairs</h2>
<p class="muted">Each token of an answer, coloured by how much more or less likely the policy makes
it than the reference does. The first pair of a run takes a while because its models are loaded.</p>
<p>Run: <strong id="inspected"></strong></p>
<form id="ask" class="tools">
<label for="set">Set</label><select id="set"><option>train</option></select>
<label for="index">Pair</label><input id="index" type="number" min="0" value="0" step="1">
<button type="submit">Show</button>
<button type="button" id="previous" aria-keyshortcuts="p">Previous</button>
<button type="button" id="next" aria-keyshortcuts="n">Next</button>
</form>
<form id="find" class="tools" role="search">
<label for="text">Find pairs with</label><input id="text" type="search" maxlength="200"
autocomplete="off"> <button type="submit">Find</button>
</form>
<p class="muted"><span id="doing" role="status"></span> <span id="waited"
aria-hidden="true"></span></p> <div id="hits"></div>
<div id="pair"></div>
</section>

<dialog id="help" aria-labelledby="help-name">
<p id="help-name"><strong>Keys</strong></p>
{_keys()}
<form method="dialog"><button>Close</button></form>
</dialog>
"""
