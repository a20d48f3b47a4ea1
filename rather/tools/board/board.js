"use strict";
/* The board: asks its own server, and inserts everything that comes from runs as text, never as markup. */
(() => {
  const EVERY = 2000;  // milliseconds between two requests for the list of runs
  const ASK_AGAIN = 300;  // and between two requests for a pair that is being computed
  const ENDED = "The board has stopped: start `rather board` again.";
  const given = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);

  let runs = [], selected = [], opened = null;
  let sort = { key: "changed", down: true };
  let drawnVersions = null, shownVersion = null;
  let charted = ["loss", "rewards/accuracies", "rewards/margins", "logps/chosen"];  // a chart for each metric
  let redraw = () => {};  // with the lines that were received last
  const rows = new Map();  // id of a run -> the elements of its row

  history.replaceState(null, "", location.pathname + location.hash);  // the token need not be in the address bar

  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (value === null || value === undefined) continue;
      if (name in made && name !== "role") made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  async function ask(path, query) {
    const words = new URLSearchParams();
    for (const [name, values] of Object.entries(query || {})) {
      for (const value of [].concat(values)) words.append(name, value);
    }
    const answer = await fetch(`${path}?${words}`, { cache: "no-store" }).catch(() => { throw new Error(ENDED); });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
  const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const is = (value) => value !== null && value !== undefined;
  const number = (value) => (is(value) ? String(Number(value.toPrecision(4))) : "");
  const share = (value) => (is(value) ? value.toFixed(3) : "");
  const minus = (a, b) => (is(a) && is(b) ? a - b : null);  // a NaN comes as null, which JavaScript would count as 0
  const plain = (value) => (is(value) ? value.toFixed(3).replace(/^-0\.000$/, "0.000").replace("-", "−") : "not finite");
  const signed = (value) => (is(value) && value >= 0.0005 ? "+" : "") + plain(value);
  const last = (path) => path.split("/").filter(Boolean).pop() || "";

  function duration(seconds) {
    if (!is(seconds)) return "";
    if (seconds < 90) return `${seconds.toFixed(0)} s`;
    if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
    return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
  }

  function table(caption, headings, lines) {
    const head = headings.map((text) => element("th", { scope: "col" }, text));
    const body = lines.map((cells) => element("tr", {}, ...cells.map((cell, place) => {
      const text = typeof cell === "number" ? number(cell) : String(cell);
      if (place === 0) return element("th", { scope: "row" }, text);
      return element("td", { className: typeof cell === "number" || /^[+−]?\d+\.\d{3}$/.test(text) ? "number" : "" }, text);
    })));
    const made = element("table", {}, element("caption", {}, element("span", {}, caption)),
      element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
    return element("div", { className: "scroll", role: "region", "aria-label": caption, tabIndex: 0 }, made);
  }

  /* --- the list --- */

  function cellsOf(run) {
    const notes = [];
    if (run.problem) notes.push(run.problem);
    if (run.health) notes.push(counted(run.health, "finding"));
    if (run.incidents) notes.push(counted(run.incidents, "incident"));
    const ago = is(run.changed) ? `${duration(Math.max(0, Date.now() / 1000 - run.changed))} ago` : "";
    return {
      state: run.state, step: is(run.step) ? `${run.step}${is(run.total) ? ` of ${run.total}` : ""}` : "", loss: number(run.loss), accuracy: share(run.accuracy),
      held_out: share(run.held_out), seconds: duration(run.seconds), changed: ago, model: last(run.model || ""),
      loss_type: run.loss_type || "", notes: notes.join("; "),
    };
  }

  function makeRow(run) {
    const box = element("input", { type: "checkbox", tabIndex: -1, "aria-label": `Compare ${run.name}` });
    const name = element("button", { type: "button", tabIndex: -1 }, run.name);
    const cells = Object.fromEntries(Object.keys(cellsOf(run)).map((key) => [key, element("td", { className: key })]));
    box.addEventListener("change", () => choose(run.id, box.checked));
    name.addEventListener("click", () => open(run.id));
    const line = element("tr", {}, element("td", {}, box), element("th", { scope: "row" }, name), ...Object.values(cells));
    line.dataset.id = run.id;
    return { line, box, name, cells };
  }

  function fillRow(row, run) {
    for (const [key, text] of Object.entries(cellsOf(run))) {
      if (row.cells[key].textContent !== text) row.cells[key].textContent = text;
    }
    row.cells.state.className = run.state;
    row.cells.model.title = run.model || "";
    row.box.checked = selected.includes(run.id);
    row.line.toggleAttribute("data-open", run.id === opened);
    row.name.toggleAttribute("aria-current", run.id === opened);
  }

  function visible() {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = runs.filter((run) => {
      const text = [run.name, run.state, run.model, run.loss_type, run.problem].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const value = (run) => (sort.key === "notes" ? (run.health || 0) + (run.incidents || 0) : run[sort.key]);
    const rank = (a, b) => {
      if (!is(a) || !is(b)) return is(a) ? -1 : is(b) ? 1 : 0;  // rows without a value come last either way
      const order = typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
      return sort.down ? -order : order;
    };
    return kept.sort((a, b) => rank(value(a), value(b)) || a.name.localeCompare(b.name));
  }

  function list() {
    const body = $("rows"), shown = visible();
    for (const run of runs) {
      if (!rows.has(run.id)) rows.set(run.id, makeRow(run));
      fillRow(rows.get(run.id), run);
    }
    const lines = shown.map((run) => rows.get(run.id).line);
    const now = [...body.children];
    if (lines.length !== now.length || lines.some((line, place) => line !== now[place])) {
      const held = document.activeElement;
      body.replaceChildren(...lines);
      if (held && body.contains(held)) held.focus({ preventScroll: true });
    }
    for (const heading of document.querySelectorAll("thead th[data-key]")) {
      if (heading.dataset.key !== sort.key) heading.removeAttribute("aria-sort");
      else heading.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
    }
    if (lines.length && !lines.some((line) => line.querySelector("[tabindex='0']"))) reachable(lines[0]);
    $("shown").textContent = shown.length < runs.length ? `${shown.length} of ${runs.length} shown` : "";
  }

  /* One row is in the tab order; the arrow keys lead to the others. */
  function reachable(line) {
    for (const control of $("rows").querySelectorAll("[tabindex='0']")) control.tabIndex = -1;
    for (const control of line.querySelectorAll("input, button")) control.tabIndex = 0;
  }

  function showStatus() {
    const counts = new Map();
    for (const run of runs) counts.set(run.state, (counts.get(run.state) || 0) + 1);
    const parts = [...counts].sort().map(([state, count]) => `${count} ${state}`);
    const text = runs.length ? `${counted(runs.length, "run")} in ${last(given.folder)}: ${parts.join(", ")}` : `No run in ${given.folder} yet.`;
    if ($("status").textContent !== text) $("status").textContent = text;
    $("status").title = given.folder;
  }

  async function poll() {
    for (;;) {
      if (!document.hidden) {
        try {
          take((await ask("/api/runs")).runs);
          await refresh();
        } catch (error) {
          showError(error);
        }
      }
      await wait(EVERY);
    }
  }

  function showError(error) {
    drawnVersions = shownVersion = null;  // retry what failed
    $("status").textContent = error.message;
  }

  const refresh = () => Promise.all([drawIfNew(), showRunIfNew()]);

  function take(found) {
    const first = runs.length === 0;
    const now = Date.now() / 1000;  // a running run writes now; the others have their own records
    runs = found.map((run) => (run.state === "running" && is(run.began) ? { ...run, changed: now, seconds: now - run.began } : run));
    const ids = new Set(runs.map((run) => run.id));
    for (const id of rows.keys()) if (!ids.has(id)) rows.delete(id);
    selected = selected.filter((id) => ids.has(id));
    if (opened !== null && !ids.has(opened)) {
      opened = null;
      forgetPair();
    }
    if (first && runs.length) {
      opened = (visible()[0] || runs[0]).id;
      selected = [opened];
    }
    list();
    showStatus();
  }

  function choose(id, on) {
    if (on && selected.length >= given.most) {
      $("compared").textContent = `At most ${given.most} runs can be compared; remove one first.`;
      list();
      return;
    }
    selected = on ? [...selected, id] : selected.filter((each) => each !== id);
    list();
    refresh().catch(showError);
  }

  function open(id) {
    if (opened !== id) forgetPair();
    opened = id;
    selected = [id];
    list();
    refresh().catch(showError);
  }

  const runOf = (id) => runs.find((run) => run.id === id);

  /* --- curves --- */

  function lineName(run, column, metric, several) {
    const set = column.slice("eval/".length, -metric.length - 1);
    const kind = column === metric ? "training" : `held-out ${set}`.trim();
    return several ? `${run.name}, ${kind}` : kind;
  }

  function figureOf(metric, answers) {
    const several = selected.length > 1, series = [];
    selected.forEach((id, place) => {
      for (const [column, [x, y]] of Object.entries(answers[id].lines[metric] || {})) {
        const held = column !== metric;
        series.push({
          name: lineName(runOf(id), column, metric, several), x, y, dots: x.length <= 24,
          colour: (several ? place : held ? 1 : 0) % 8 + 1, dashed: held,
        });
      }
    });
    return { x: "step", series };
  }

  function numbersOf(metric, figure) {
    const lines = figure.series.map((line) => {
      const known = line.y.filter(is);
      const range = known.length ? [known[0], known[known.length - 1], Math.min(...known), Math.max(...known)] : ["", "", "", ""];
      return [line.name, known.length, ...range];
    });
    return table(`${metric}: summary of the points drawn`, ["line", "points", "first", "last", "lowest", "highest"], lines);
  }

  function chartAt(place) {
    const charts = $("charts");
    while (charts.children.length <= place) {
      const name = `chart-${charts.children.length}`;
      charts.append(element("figure", { className: "chart", "aria-labelledby": name, "aria-describedby": `${name}-about` },
        element("figcaption", {}, element("button", { type: "button", className: "remove" }, "Remove"), element("strong", { id: name }), element("span", { id: `${name}-about` })),
        element("div", { className: "plot" }),
        element("details", {}, element("summary", {}, "Numbers", element("span", { className: "unseen" })), element("div"))));
    }
    return charts.children[place];
  }

  function drawChart(place, metric, answers) {
    const chart = chartAt(place), figure = figureOf(metric, answers);
    const [button, name, caption] = chart.querySelectorAll("figcaption > *");
    name.textContent = metric;
    button.setAttribute("aria-label", `Remove the chart of ${metric}`);
    button.onclick = () => showCharts(charted.filter((each) => each !== metric));
    const several = selected.length > 1;  // then training lines are enough; the table has all
    const newest = figure.series.filter((line) => line.x.length && !(several && line.dashed)).map((line) => {
      const known = line.y.filter(is), value = known.length ? number(known[known.length - 1]) : "not finite";
      return `${line.name} ${value}${several ? "" : ` at step ${line.x[line.x.length - 1]}`}`;
    });
    caption.textContent = newest.join("; ") || "no selected run has this metric";
    chart.querySelector("summary span").textContent = ` of ${metric}`;
    chart.querySelector("details > div").replaceChildren(numbersOf(metric, figure));
    rather.draw(chart.querySelector(".plot"), smoothed(figure));
  }

  /* Each line as the running mean of its points, weighted less and less; the points themselves stay, faint. */
  function smoothed({ x, series }) {
    const weight = Number($("smoothing").value);
    const mean = (values) => {
      let sum = 0, norm = 0;
      return values.map((value) => {
        if (!is(value)) return null;
        [sum, norm] = [weight * sum + value, weight * norm + 1];
        return sum / norm;
      });
    };
    const pair = (line) => [{ ...line, faint: true }, { ...line, dots: false, y: mean(line.y) }];
    return { x, series: weight ? series.flatMap(pair) : series };
  }

  function offerMetrics(answers) {
    const box = $("metric"), names = [...new Set(Object.values(answers).flatMap((answer) => answer.metrics))];
    const offered = ["", ...names.filter((name) => !charted.includes(name)).sort()];
    box.disabled = charted.length >= given.charts;
    if (offered.join() === [...box.options].map((option) => option.value).join()) return;
    box.replaceChildren(...offered.map((name) => element("option", { value: name }, name || "choose a metric")));
  }

  function showCharts(metrics) {
    charted = metrics;
    drawIfNew().catch(showError);
  }

  async function draw(versions) {
    const chosen = selected.slice(), metrics = charted.slice();
    const [answers, differing] = await Promise.all([
      chosen.length ? ask("/api/curves", { run: chosen, metric: metrics }) : {},
      chosen.length > 1 ? ask("/api/differences", { run: chosen }) : null,
    ]);
    if (versions !== drawnVersions) return;  // a newer request is under way
    const damaged = chosen.filter((id) => answers[id].damaged).map((id) => `${runOf(id).name}: ${counted(answers[id].damaged, "damaged line")} left out`);
    const names = chosen.map((id) => runOf(id).name);
    $("compared").textContent = [names.join(", ") || "Select a run in the list.", ...damaged].join("; ");
    $("charts").hidden = !chosen.length;
    showDifferences(names, differing);
    if (!chosen.length) return;
    redraw = () => metrics.forEach((metric, place) => drawChart(place, metric, answers));
    redraw();
    while ($("charts").children.length > metrics.length) $("charts").lastElementChild.remove();
    offerMetrics(answers);
  }

  async function drawIfNew() {
    const versions = [...charted, ...selected.map((id) => `${id}${runOf(id).version}`)].join();
    if (versions === drawnVersions) return;
    drawnVersions = versions;
    await draw(versions);
  }

  function showDifferences(names, differing) {
    if (differing === null) {
      $("different").replaceChildren(element("p", { className: "muted" }, "Select two or more runs: the settings that differ appear here side by side."));
      return;
    }
    const lines = differing.differences.map(([key, values]) => [key, ...values.map((value) => (value === null ? "not set" : value))]);
    $("different").replaceChildren(lines.length
      ? table("Settings that differ", ["key", ...names], lines)
      : element("p", {}, "All settings are the same."));
  }

  /* --- one run --- */

  async function showRunIfNew() {
    const version = opened === null ? "" : `${opened}${runOf(opened).story}`;
    if (version === shownVersion) return;
    shownVersion = version;
    $("inspected").textContent = opened === null ? "none" : runOf(opened).name;
    if (opened === null) {
      $("opened").replaceChildren(element("p", { className: "muted" }, "Click the name of a run in the list to open it."));
      return;
    }
    const found = await ask("/api/run", { run: opened });
    if (version !== shownVersion) return;
    const run = runOf(opened);
    const about = `: ${run.state}; model ${last(run.model || "unknown")}; folder ${last(given.folder)}/${run.name}`;
    const link = run.report ? element("a", { href: `/report?run=${run.id}`, target: "_blank", rel: "noopener" }, "Report of this run") : null;
    const parts = [element("p", { title: `${run.model || ""}\n${found.folder}` }, element("strong", {}, run.name), about, link && "; ", link)];
    if (found.result) parts.unshift(element("p", {}, found.result));
    for (const problem of found.problems) parts.push(element("p", { className: "damaged" }, problem));
    parts.push(element("div", { className: "grid" },
      element("div", {}, element("h3", {}, "Findings"), findings(found.health.lines)),
      element("div", {}, element("h3", {}, "Answers"), ...answersOf(found.answers.lines))));
    const happened = found.incidents.lines.length + found.incidents.left_out;
    if (happened) parts.push(element("details", {}, element("summary", {}, counted(happened, "incident")), incidents(found.incidents)));
    const settings = Object.entries(found.config).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)]);
    parts.push(element("details", {}, element("summary", {}, "Settings"), table("All settings", ["key", "value"], settings)));
    $("opened").replaceChildren(...parts);
  }

  function findings(lines) {
    if (!lines.length) return element("p", { className: "muted" }, "No problems found.");
    const items = lines.map((line) => element("li", {},
      element("strong", { className: String(line.severity) }, `${line.severity}, step ${line.step}: ${line.name}`),
      ...[line.text, line.advice].filter(Boolean).map((text) => element("p", { className: "finding" }, String(text)))));
    return element("ul", { className: "findings" }, ...items);
  }

  function incidents({ lines, left_out: leftOut }) {
    const cells = lines.slice().reverse().map(({ time, kind, step, ...facts }) => [
      time || "", step ?? "", kind || "", Object.entries(facts).map(([name, fact]) => `${name}: ${typeof fact === "object" ? JSON.stringify(fact) : fact}`).join("; "),
    ]);
    return table(leftOut ? `The last ${lines.length} incidents; ${leftOut} earlier ones are in the file` : "Incidents, newest first", ["time", "step", "kind", "what"], cells);
  }

  function answersOf(lines) {
    if (!lines.length) return [element("p", { className: "muted" }, "None. Set eval_prompts to get answers.")];
    const steps = [...new Set(lines.map((line) => line.step))];
    const box = element("select", { id: "answers-step" }, ...steps.map((step) => element("option", { value: step, selected: step === steps[steps.length - 1] }, String(step))));
    const place = element("div");
    const fill = () => {
      const [first, ...others] = lines.filter((line) => String(line.step) === box.value).map(oneAnswer);
      const more = others.length ? element("details", {}, element("summary", {}, counted(others.length, "more prompt")), ...others) : null;
      place.replaceChildren(...[first, more].filter((part) => part));
    };
    box.addEventListener("change", fill);
    fill();
    return [element("div", { className: "tools" }, element("label", { htmlFor: "answers-step" }, "At step"), box), place];
  }

  function oneAnswer(line) {
    const side = (name, text, stats) => element("div", {},
      element("h4", {}, name), element("p", { className: "answer" }, String(text ?? "")),
      element("small", { className: "muted" }, `${counted(stats?.tokens ?? "?", "token")}, ${stats?.ended ? "ended by itself" : "cut at the limit"}, repetition ${Number(stats?.repetition ?? 0).toFixed(2)}`));
    return element("div", { className: "card" }, element("p", { className: "answer" }, element("strong", {}, String(line.prompt ?? ""))),
      element("div", { className: "grid" }, side("Before: the reference", line.reference, line.reference_stats), side(`After: the policy at step ${line.step}`, line.policy, line.policy_stats)));
  }

  /* --- pairs --- */

  let question = 0;  // answers to earlier ones are ignored

  function forgetPair() {
    question += 1;
    $("index").value = 0;
    $("index").removeAttribute("max");
    $("set").replaceChildren(element("option", {}, "train"));
    for (const id of ["doing", "waited", "hits", "pair"]) $(id).replaceChildren();
  }

  async function answered(query) {
    const mine = ++question, began = Date.now();
    for (;;) {
      const answer = await ask("/api/pair", { run: opened, set: $("set").value, ...query });
      if (mine !== question) return null;
      const seconds = Math.round((Date.now() - began) / 1000);
      const texts = { done: "", refused: answer.why, working: answer.doing };
      if ($("doing").textContent !== texts[answer.state]) $("doing").textContent = texts[answer.state];
      $("doing").classList.toggle("damaged", answer.state === "refused");
      $("waited").textContent = answer.state === "working" && seconds >= 2 ? `${seconds} s` : "";
      if (answer.state !== "working") return answer.state === "done" ? answer : null;
      await wait(ASK_AGAIN);
      if (mine !== question) return null;
    }
  }

  function offerSets(sets) {
    const box = $("set"), wanted = box.value, names = Object.keys(sets);
    if (names.join() !== [...box.options].map((option) => option.value).join()) {
      box.replaceChildren(...names.map((name) => element("option", { value: name, selected: name === wanted }, `${name}`)));
    }
    $("index").max = Math.max(0, sets[box.value] - 1);
  }

  async function showPair() {
    if (opened === null) return;
    const focused = document.activeElement && document.activeElement.closest("#pair") !== null;
    const answer = await answered({ index: Math.max(0, Math.floor(Number($("index").value)) || 0) });
    if (answer === null) return;
    offerSets(answer.sets);
    $("index").value = answer.index;
    renderPair(answer);
    if (focused) $("pair").querySelector("[role='option'][tabindex='0']").focus();
  }

  function move(by) {
    const most = Number($("index").max || Infinity);
    $("index").value = Math.min(most, Math.max(0, Number($("index").value) + by));
    showPair().catch(showError);
  }

  async function find(start) {
    if (opened === null) return;
    const answer = await answered({ search: $("text").value, index: start });
    if (answer === null) return;
    offerSets(answer.sets);
    const hits = answer.hits.map((hit) => {
      const button = element("button", { type: "button" }, `Pair ${hit.index}${hit.id ? ` (${hit.id})` : ""}`);
      button.addEventListener("click", () => { $("index").value = hit.index; showPair().catch(showError); });
      return element("li", {}, button, " ", element("span", { className: "muted" }, `… ${hit.prompt.slice(-100)} `), hit.chosen);
    });
    const { total, next } = answer, places = start ? `${start + 1} to ${start + hits.length}` : `the first ${hits.length}`;
    let said = total || hits.length ? `${counted(total || hits.length, "pair")} found` : "No pair found";
    if (total > hits.length) said += `, ${places} shown`;
    else if (total === null && next !== null) said += ` before pair ${next}`;
    const parts = [element("p", {}, said), element("ul", { className: "findings" }, ...hits)];
    if (next !== null) {
      const more = element("button", { type: "button" }, total === null ? `Continue from pair ${next}` : "Show more");
      more.addEventListener("click", () => find(next).catch(showError));
      parts.push(more);
    }
    $("hits").replaceChildren(...parts);
  }

  function ratios(side, when) {
    return side.logps[when].map((value, place) => minus(value, side.logps.reference[place]));
  }

  function renderPair(answer) {
    const sides = Object.values(answer.sides);
    const first = Math.min(answer.prompt_tokens, ...sides.map((side) => side.scored[0]).filter(is));
    const readout = element("p", { className: "readout muted" }, "Point at a token, or use Tab and the arrow keys.");
    const lists = Object.fromEntries(Object.entries(answer.sides).map(([name, side]) => [name, tokenList(name, side, first, readout)]));
    const scale = element("div", { className: "scale" });
    const numbers = element("details", {}, element("summary", {}, "Numbers of all tokens"), element("div"));
    const colour = (when) => {
      const all = sides.flatMap((side) => ratios(side, when).map(Math.abs)).sort((a, b) => a - b);
      const most = all.length ? all[Math.floor(0.98 * (all.length - 1))] : 0;
      for (const [name, side] of Object.entries(answer.sides)) paint(lists[name], side, when, most);
      scale.replaceChildren(element("span", {}, `${plain(-most)} nats: less likely`), element("i", { "aria-hidden": "true" }), element("span", {}, `${signed(most)} nats: more likely`));
    };
    numbers.addEventListener("toggle", () => { if (numbers.open) numbers.lastChild.replaceChildren(...tokenTables(answer)); });
    const ways = element("fieldset", {}, element("legend", {}, "Coloured by policy / reference"), ...["after", "before"].map((when) => {
      const radio = element("input", { type: "radio", name: "when", value: when, checked: when === "after" });
      radio.addEventListener("change", () => colour(when));
      return element("label", {}, radio, ` ${when} training`);
    }));
    $("pair").replaceChildren(
      element("h3", {}, `Pair ${answer.index} of ${answer.pairs}${answer.id ? ` (${answer.id})` : ""}`),
      element("p", { id: "verdict" }, verdict(answer)), sumsOf(answer), ways, scale,
      element("h4", {}, "Prompt"),
      element("p", { className: "said prompt", tabIndex: 0, role: "region", "aria-label": "Prompt" }, sides[0].texts.slice(0, first).join("")),
      ...Object.entries(lists).flatMap(([name, list]) => [element("h4", {}, name[0].toUpperCase() + name.slice(1)), list]), readout, numbers);
    colour("after");
  }

  function verdict(answer) {
    const gain = (side) => minus(side.sums.after, side.sums.before);
    const gains = Object.entries(answer.sides).map(([name, side]) => `of the ${name} answer by ${signed(gain(side))} nats`);
    const reward = (when) => plain(gains.length > 1 ? minus(...answer.rewards[when]) : answer.rewards[when][0]);
    return `Training changed the log-probability ${gains.join(" and that ")}; ` +
      `reward${gains.length > 1 ? " margin" : ""} ${reward("before")} before, ${reward("after")} after. ` +
      `Reference: ${last(answer.models.reference)}. Policy before: ${last(answer.models.before)}, after: ${answer.models.after}.`;
  }

  function sumsOf(answer) {
    const moved = answer.models.before !== "the reference itself";  // else "before" repeats the reference
    const names = Object.keys(answer.sides);
    const sums = (when) => names.map((name) => answer.sides[name].sums[when]);
    const logRatios = (when) => sums(when).map((value, place) => minus(value, sums("reference")[place]));
    const columns = [
      ["log-prob reference", sums("reference"), plain], ["log-prob before", sums("before"), plain], ["log-prob after", sums("after"), plain],
      ["log-ratio before", logRatios("before"), signed], ["log-ratio after", logRatios("after"), signed],
      ["reward before", answer.rewards.before, plain], ["reward after", answer.rewards.after, plain],
    ].filter(([heading]) => moved || !heading.endsWith("before"));
    const lines = names.map((name, place) => [name, ...columns.map(([, values, shown]) => shown(values[place]))]);
    if (names.length > 1) lines.push(["margin", ...columns.map(([, values]) => signed(minus(...values)))]);
    return table("Sums over the scored tokens, in nats, and rewards", ["answer", ...columns.map(([heading]) => heading)], lines);
  }

  function shownText(text) {
    return text === "" ? "·" : text.replaceAll("\n", "⏎\n");
  }

  function tokenList(name, side, first, readout) {
    const places = new Map(side.scored.map((token, place) => [token, place]));
    const options = side.texts.slice(first).map((text, offset) => {
      const place = places.get(first + offset);
      const option = element("span", { className: `token${place === undefined ? " unscored" : ""}`, role: "option", tabIndex: -1, "aria-selected": "false" }, shownText(text));
      const words = () => {
        if (place === undefined) return `${JSON.stringify(text)}: not scored`;
        const of = (model) => side.logps[model][place];
        return `${JSON.stringify(text)}: log-ratio ${signed(minus(of("after"), of("reference")))} after, ${signed(minus(of("before"), of("reference")))} before; ` +
          `log-prob ${plain(of("reference"))} by the reference, ${plain(of("after"))} by the trained policy`;
      };
      option.setAttribute("aria-label", words());
      const show = () => { readout.textContent = words(); readout.classList.remove("muted"); };
      option.addEventListener("mouseenter", show);
      option.addEventListener("focus", show);
      return option;
    });
    if (options.length) options[0].tabIndex = 0;
    const made = element("div", { className: "said tokens", role: "listbox", "aria-label": `Tokens of the ${name} answer`, "aria-orientation": "horizontal" }, ...options);
    made.addEventListener("keydown", stepAmongTokens);
    return made;
  }

  function paint(list, side, when, most) {
    const places = new Map(side.scored.map((token, place) => [token, place]));
    const first = side.texts.length - list.children.length, values = ratios(side, when);
    [...list.children].forEach((option, offset) => {
      const place = places.get(first + offset);
      if (place === undefined) return;
      option.classList.toggle("up", values[place] > 0);
      option.classList.toggle("down", values[place] < 0);
      option.style.setProperty("--share", most ? Math.min(1, Math.abs(values[place]) / most) : 0);
    });
  }

  function tokenTables(answer) {
    return Object.entries(answer.sides).map(([name, side]) => table(`Scored tokens of the ${name} answer`,
      ["token", "text", "reference", "before", "after", "log-ratio before", "log-ratio after"],
      side.scored.map((token, place) => {
        const of = (model) => side.logps[model][place];
        return [token, JSON.stringify(side.texts[token]), plain(of("reference")), plain(of("before")), plain(of("after")),
          signed(minus(of("before"), of("reference"))), signed(minus(of("after"), of("reference")))];
      })));
  }

  function focusOption(option) {
    for (const each of option.parentElement.querySelectorAll("[tabindex='0']")) each.tabIndex = -1;
    option.tabIndex = 0;
    option.focus();
  }

  function stepAmongTokens(event) {
    const options = [...event.currentTarget.children], at = options.indexOf(document.activeElement);
    const lists = [...$("pair").querySelectorAll("[role='listbox']")];
    const other = (lists[1 - lists.indexOf(event.currentTarget)] || event.currentTarget).children;
    const targets = {
      ArrowRight: options[at + 1], ArrowLeft: options[at - 1], Home: options[0], End: options[options.length - 1],
      ArrowDown: other[Math.min(at, other.length - 1)], ArrowUp: other[Math.min(at, other.length - 1)],
    };
    if (!(event.key in targets)) return;
    event.preventDefault();
    if (targets[event.key]) focusOption(targets[event.key]);
  }

  /* --- keys --- */

  $("rows").addEventListener("keydown", (event) => {
    const line = event.target.closest("tr");
    const next = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
    if (!["ArrowDown", "ArrowUp"].includes(event.key)) return;
    event.preventDefault();
    if (!next) return;
    reachable(next);
    next.querySelector(event.target.tagName.toLowerCase()).focus();
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    const keys = { "/": () => $("filter").focus(), "?": () => $("help").showModal(), n: () => move(1), p: () => move(-1) };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });

  for (const heading of document.querySelectorAll("thead th[data-key]")) {
    heading.querySelector("button").addEventListener("click", () => {
      const { key } = heading.dataset;
      sort = { key, down: sort.key === key ? !sort.down : !["name", "state", "model", "loss_type"].includes(key) };
      list();
    });
  }
  const submitted = (action) => (event) => { event.preventDefault(); action(); };
  $("filter").addEventListener("input", list);
  $("metric").addEventListener("change", () => showCharts([...charted, $("metric").value]));
  $("smoothing").addEventListener("input", () => {
    $("smoothed").textContent = Number($("smoothing").value) ? $("smoothing").value : "off";
    redraw();
  });
  $("keys").addEventListener("click", () => $("help").showModal());
  $("ask").addEventListener("submit", submitted(() => showPair().catch(showError)));
  $("find").addEventListener("submit", submitted(() => find(0).catch(showError)));
  $("set").addEventListener("change", () => { $("index").value = 0; showPair().catch(showError); });
  $("previous").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", poll);
  else poll();
})();
