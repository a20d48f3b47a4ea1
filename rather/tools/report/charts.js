"use strict";
/* Charts as SVG in the colours of the style sheet. `rather.draw(element, figure)` draws one, and again when its width changes.

   figure: { series, x, y (titles), bars, range: [least, most], percent }
   one of series: { name, x: [], y: [] (null is a gap), colour: 1 to 8, dashed, dots, faint } */
const rather = (() => {
  const HEIGHT = 260, TOP = 10, BOTTOM = 42, RIGHT = 14;
  const LETTER = 7;  // pixels of a character, about
  const REACH = 8;  // pixels from the pointer to a point that it shows
  const figures = new WeakMap(), widths = new WeakMap();
  const is = (value) => value !== null && value !== undefined;

  /* An element; what it says comes from data, so it is set as text. */
  function make(tag, attributes, ...children) {
    const isHtml = ["div", "ul", "li", "i", "p"].includes(tag);
    const made = isHtml ? document.createElement(tag) : document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return made;
  }

  function shown(value, percent, digits = 5) {
    if (typeof value === "string") return value;
    if (percent) return `${Number((100 * value).toPrecision(digits))}%`;
    const size = Math.abs(value), rounded = Number(value.toPrecision(digits));
    if (size > 0 && (size < 1e-3 || size >= 1e9)) return rounded.toExponential();
    return rounded.toLocaleString("en", { maximumFractionDigits: 12 });
  }

  /* Round numbers between two others, about as many as `count`. */
  function ticks(least, most, count, smallest = 0) {
    const rough = Math.max((most - least) / count, smallest), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const first = Math.ceil(least / step - 1e-9), last = Math.floor(most / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
  }

  /* Lowest and highest, with some room around them. */
  function spread(values, room) {
    if (!values.length) return [0, 1];
    const least = Math.min(...values), most = Math.max(...values);
    const margin = most > least ? room * (most - least) : Math.abs(most) / 10 || 1;
    return [least - margin, most + margin];
  }

  /* From an x to pixels; `labelled` are those with a label, `slot` is the room of a group of bars. */
  function horizontal({ bars, series }, left, width) {
    const all = [...new Set(series.flatMap((line) => line.x))];
    if (bars) {
      const slot = width / Math.max(1, all.length), places = new Map(all.map((x, place) => [x, place]));
      const longest = Math.max(1, ...all.map((x) => shown(x).length));
      const every = Math.max(1, Math.ceil((LETTER * longest + 10) / slot));
      return { slot, across: (x) => left + slot * (places.get(x) + 0.5), labelled: all.filter((_, place) => place % every === 0) };
    }
    const [first, last] = spread(all, 0);
    const across = (x) => left + width * (x - first) / (last - first);
    return { slot: 0, across, labelled: ticks(first, last, Math.max(4, width / 70), 1) };
  }

  /* From a y to pixels, and the ticks with their labels. */
  function vertical({ bars, range, percent, series }) {
    const heights = series.flatMap((line) => line.y).filter(is);
    const [least, most] = range || (bars ? [0, 1.05 * Math.max(...heights, 0) || 1] : spread(heights, 0.06));
    const rows = ticks(least, most, 5).map((value) => [value, shown(value, percent, 12)]);
    return { rows, down: (value) => TOP + (HEIGHT - BOTTOM - TOP) * (most - value) / (most - least) };
  }

  function axes({ x, y }, { rows, down }, { across, labelled }, left, width) {
    const centred = (place, text) => make("text", { "text-anchor": "middle", ...place }, text);
    const grid = rows.flatMap(([value, label]) => [
      make("path", { class: "grid", d: `M${left} ${down(value)}H${width - RIGHT}` }),
      make("text", { x: left - 6, y: down(value) + 4, "text-anchor": "end" }, label)]);
    const labels = labelled.map((value) => {
      const end = across(value) > width - 30 ? { "text-anchor": "end" } : {};
      return centred({ x: across(value), y: HEIGHT - BOTTOM + 17, ...end }, shown(value));
    });
    const titles = [centred({ x: (left + width - RIGHT) / 2, y: HEIGHT - 5 }, x)];
    if (y) titles.push(centred({ transform: `translate(11 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)` }, y));
    return [...grid, ...labels, ...titles];
  }

  /* A gap begins a new part of the path; a point between two gaps is a dot, by its round ends. */
  function path(line, across, down) {
    let text = "", after = null;
    line.x.forEach((x, place) => {
      const y = line.y[place];
      if (is(y)) text += `${is(after) ? "L" : "M"}${across(x).toFixed(1)} ${down(y).toFixed(1)}${is(after) ? "" : "h0"}`;
      after = y;
    });
    return text;
  }

  function legend(named) {
    const key = (line) => make("i", { class: line.dashed ? "dashed" : "", style: line.style });
    return make("ul", { class: "legend" }, ...named.map((line) => make("li", {}, key(line), line.name)));
  }

  /* The values under the pointer, next to it, and a line at their x. */
  function follow(figure, named, surface, { across, slot }, width) {
    const box = make("div", { class: "values", hidden: "" }), cursor = make("path", { class: "cursor" });
    const nearest = (line, at) => {
      let best = null;
      line.x.forEach((x, place) => {
        const apart = Math.abs(across(x) - at);
        if (is(line.y[place]) && apart <= Math.max(REACH, slot / 2) && !(best && best.apart <= apart)) best = { line, x, y: line.y[place], apart };
      });
      return best;
    };
    const show = (event) => {
      const at = event.clientX - surface.getBoundingClientRect().left;
      const points = named.map((line) => nearest(line, at)).filter(is);
      box.hidden = !points.length;
      if (box.hidden) return hide();
      const { x } = points.reduce((a, b) => (b.apart < a.apart ? b : a)), place = across(x);
      const lines = points.map((point) => make("li", {}, make("i", { style: point.line.style }),
        `${point.line.name}: ${shown(point.y, figure.percent)}${point.x === x ? "" : ` (at ${shown(point.x)})`}`));
      box.replaceChildren(make("p", {}, `${figure.x}: ${shown(x)}`), make("ul", {}, ...lines));
      box.style.left = place < width / 2 ? `${place + 12}px` : "auto";
      box.style.right = place < width / 2 ? "auto" : `${width - place + 12}px`;
      cursor.setAttribute("d", `M${place} ${TOP}V${HEIGHT - BOTTOM}`);
    };
    const hide = () => { box.hidden = true; cursor.setAttribute("d", ""); };
    for (const name of ["pointermove", "pointerdown"]) surface.addEventListener(name, show);
    surface.addEventListener("pointerleave", hide);
    surface.append(cursor);
    return box;
  }

  /* The bars, or the line with its dots. */
  function shape(line, number, count, isBars, { across, slot }, down) {
    const points = line.x.map((x, place) => [across(x), line.y[place]]).filter(([, y]) => is(y));
    const thin = 0.85 * slot / count, first = number * thin - 0.425 * slot, ground = HEIGHT - BOTTOM;
    const bars = ([x, y]) => make("rect", { x: x + first, y: down(y), width: thin, height: Math.max(0, ground - down(y)) });
    const dots = ([x, y]) => make("circle", { cx: x, cy: down(y), r: 3 });
    const group = make("g", { style: line.style, class: line.faint ? "faint" : "" });
    if (isBars) group.append(...points.map(bars));
    else group.append(make("path", { class: line.dashed ? "line dashed" : "line", d: path(line, across, down) }));
    if (line.dots) group.append(...points.map(dots));
    return group;
  }

  function draw(element, figure) {
    figures.set(element, figure);
    resized.observe(element);
    const width = element.clientWidth;
    widths.set(element, width);
    if (!width) return;  // not visible yet: `resized` draws it then
    const style = (line, place) => `--colour: var(--series-${line.colour || place % 8 + 1})`;
    const series = figure.series.map((line, place) => ({ ...line, style: style(line, place) }));
    const named = series.filter((line) => !line.faint);
    const heights = vertical(figure);
    const left = 10 + LETTER * Math.max(0, ...heights.rows.map(([, label]) => label.length)) + (figure.y ? 18 : 0);
    const places = horizontal(figure, left, width - left - RIGHT);
    const surface = make("svg", { width, height: HEIGHT, "aria-hidden": "true" });  // a table has its numbers
    surface.append(...axes(figure, heights, places, left, width));
    surface.append(...series.map((line, number) => shape(line, number, series.length, figure.bars, places, heights.down)));
    const values = follow(figure, named, surface, places, width);
    element.replaceChildren(...(named.length > 1 ? [legend(named)] : []), surface, values);
  }

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (!target.isConnected) resized.unobserve(target);
      else if (target.clientWidth !== widths.get(target)) draw(target, figures.get(target));
    }
  });

  return { draw };
})();
