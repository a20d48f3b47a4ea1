"use strict";
/* Charts as SVG in the colours of the style sheet. `rather.draw(element, figure)` draws one, and again when its width changes.

   A figure has { series, x, y (titles), bars, range: [least, most], percent }.
   Each of its series has { name, x: [], y: [] (null is a gap), colour: 1 to 8, dashed, dots, faint }. */
const rather = (() => {
  const HEIGHT = 260, TOP = 10, BOTTOM = 42, RIGHT = 14;
  const LETTER = 7;  // pixels of a character, about
  const REACH = 8;  // pixels from the pointer to a point that it shows
  const figures = new WeakMap(), widths = new WeakMap();
  const is = (value) => value !== null && value !== undefined;

  /* Return an element. Its text comes from data and is never markup. */
  function make(tag, attributes, ...children) {
    const isHtml = ["div", "ul", "li", "i", "p"].includes(tag);
    const made = isHtml ? document.createElement(tag) : document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return made;
  }

  function formatted(value, percent, digits = 5) {
    if (typeof value === "string") return value;
    if (percent) return `${Number((100 * value).toPrecision(digits))}%`;
    const size = Math.abs(value), rounded = Number(value.toPrecision(digits));
    if (size > 0 && (size < 1e-3 || size >= 1e9)) return rounded.toExponential();
    return rounded.toLocaleString("en", { maximumFractionDigits: 12 });
  }

  /* Return round numbers between two others, about as many as `count`. */
  function ticks(least, most, count, smallest = 0) {
    const rough = Math.max((most - least) / count, smallest);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const first = Math.ceil(least / step - 1e-9), last = Math.floor(most / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
  }

  /* Return the lowest and the highest value, with some room around them. */
  function spread(values, room) {
    if (!values.length) return [0, 1];
    const least = Math.min(...values), most = Math.max(...values);
    const margin = most > least ? room * (most - least) : Math.abs(most) / 10 || 1;
    return [least - margin, most + margin];
  }

  /* Return the x axis: xToPixel, the x values with a label, and the width of a group of bars. */
  function horizontal({ bars, series }, left, width) {
    const all = [...new Set(series.flatMap((line) => line.x))];
    if (bars) {
      const slot = width / Math.max(1, all.length);
      const places = new Map(all.map((x, place) => [x, place]));
      const longest = Math.max(1, ...all.map((x) => formatted(x).length));
      const every = Math.max(1, Math.ceil((LETTER * longest + 10) / slot));
      const labelled = all.filter((_, place) => place % every === 0);
      return { slot, xToPixel: (x) => left + slot * (places.get(x) + 0.5), labelled };
    }
    const [least, last] = spread(all, 0);
    const first = Math.max(0, least);  // no step is negative
    const xToPixel = (x) => left + width * (x - first) / (last - first);
    return { slot: 0, xToPixel, labelled: ticks(first, last, Math.max(4, width / 70), 1) };
  }

  /* Return the y axis: yToPixel, and the ticks with their labels. */
  function vertical({ bars, range, percent, series }) {
    const heights = series.flatMap((line) => line.y).filter(is);
    const [least, most] = range || (bars ? [0, 1.05 * Math.max(...heights, 0) || 1] : spread(heights, 0.06));
    const rows = ticks(least, most, 5).map((value) => [value, formatted(value, percent, 12)]);
    return { rows, yToPixel: (value) => TOP + (HEIGHT - BOTTOM - TOP) * (most - value) / (most - least) };
  }

  function axes({ x, y }, { rows, yToPixel }, { xToPixel, labelled }, left, width) {
    const centred = (place, text) => make("text", { "text-anchor": "middle", ...place }, text);
    const grid = rows.flatMap(([value, label]) => [
      make("path", { class: "grid", d: `M${left} ${yToPixel(value)}H${width - RIGHT}` }),
      make("text", { x: left - 6, y: yToPixel(value) + 4, "text-anchor": "end" }, label)]);
    const labels = labelled.map((value) => {
      const middle = xToPixel(value);
      const end = middle > width - 30 ? { "text-anchor": "end" } : {};
      return centred({ x: middle, y: HEIGHT - BOTTOM + 17, ...end }, formatted(value));
    });
    const titles = [centred({ x: (left + width - RIGHT) / 2, y: HEIGHT - 5 }, x)];
    if (y) titles.push(centred({ transform: `translate(11 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)` }, y));
    return [...grid, ...labels, ...titles];
  }

  /* Return the path of a line. A gap begins a new part; the round ends of a point between two gaps make it a dot. */
  function path(line, xToPixel, yToPixel) {
    let text = "", previous = null;
    line.x.forEach((x, place) => {
      const y = line.y[place];
      if (is(y)) {
        const point = `${xToPixel(x).toFixed(1)} ${yToPixel(y).toFixed(1)}`;
        text += is(previous) ? `L${point}` : `M${point}h0`;
      }
      previous = y;
    });
    return text;
  }

  function legend(named) {
    const key = (line) => make("i", { class: line.dashed ? "dashed" : "", style: line.style });
    return make("ul", { class: "legend" }, ...named.map((line) => make("li", {}, key(line), line.name)));
  }

  /* Show the values under the pointer next to it, and a line at their x. */
  function follow(figure, named, surface, { xToPixel, slot }, width) {
    const box = make("div", { class: "values", hidden: "" }), cursor = make("path", { class: "cursor" });
    const nearest = (line, at) => {
      let best = null, shortest = Math.max(REACH, slot / 2);
      line.x.forEach((x, place) => {
        const y = line.y[place], distance = Math.abs(xToPixel(x) - at);
        if (!is(y) || distance > shortest || (best && distance === shortest)) return;
        best = { line, x, y, distance };
        shortest = distance;
      });
      return best;
    };
    const exact = (x) => formatted(x, false, 12);  // a step is a name, not a measurement
    const show = (event) => {
      const at = event.clientX - surface.getBoundingClientRect().left;
      const points = named.map((line) => nearest(line, at)).filter(is);
      box.hidden = !points.length;
      if (box.hidden) return hide();
      const { x } = points.reduce((a, b) => (b.distance < a.distance ? b : a));
      const place = xToPixel(x);
      const lines = points.map((point) => make("li", {}, make("i", { style: point.line.style }),
        `${point.line.name}: ${formatted(point.y, figure.percent)}${point.x === x ? "" : ` (at ${exact(point.x)})`}`));
      box.replaceChildren(make("p", {}, `${figure.x}: ${exact(x)}`), make("ul", {}, ...lines));
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

  /* Return the bars, or the line with its dots. */
  function shape(line, number, count, isBars, { xToPixel, slot }, yToPixel) {
    const pixels = line.x.map((x, place) => [xToPixel(x), line.y[place]]);
    const points = pixels.filter(([, y]) => is(y)).map(([x, y]) => [x, yToPixel(y)]);
    const barWidth = 0.85 * slot / count, ground = HEIGHT - BOTTOM;
    const first = number * barWidth - 0.425 * slot;
    const bars = ([x, y]) => make("rect", { x: x + first, y, width: barWidth, height: Math.max(0, ground - y) });
    const dots = ([cx, cy]) => make("circle", { cx, cy, r: 3 });
    const group = make("g", { style: line.style, class: line.faint ? "faint" : "" });
    if (isBars) group.append(...points.map(bars));
    else group.append(make("path", { class: line.dashed ? "line dashed" : "line", d: path(line, xToPixel, yToPixel) }));
    if (line.dots) group.append(...points.map(dots));
    return group;
  }

  function draw(element, figure) {
    if (!figures.has(element)) resized.observe(element);
    figures.set(element, figure);
    const width = element.clientWidth;
    widths.set(element, width);
    if (!width) return;  // not visible yet: `resized` draws it then
    try {
      element.replaceChildren(...parts(figure, width));
    } catch (error) {  // a damaged file of the run must not stop the other charts
      console.warn(error);
      element.textContent = "This chart cannot be drawn; the table has its numbers.";
    }
  }

  /* Return the legend, the drawing, and the values under the pointer. */
  function parts(figure, width) {
    const style = (line, place) => `--colour: var(--series-${line.colour || place % 8 + 1})`;
    const series = figure.series.map((line, place) => ({ ...line, style: style(line, place) }));
    const named = series.filter((line) => !line.faint);
    const yAxis = vertical(figure);
    const left = 10 + LETTER * Math.max(0, ...yAxis.rows.map(([, label]) => label.length)) + (figure.y ? 18 : 0);
    const xAxis = horizontal(figure, left, width - left - RIGHT);
    // A table has the numbers. Paper narrower than the window scales the drawing, by its viewBox.
    const surface = make("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
    surface.append(...axes(figure, yAxis, xAxis, left, width));
    surface.append(...series.map((line, number) => shape(line, number, series.length, figure.bars, xAxis, yAxis.yToPixel)));
    const values = follow(figure, named, surface, xAxis, width);
    return [...(named.length > 1 ? [legend(named)] : []), surface, values];
  }

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (!target.isConnected) {
        resized.unobserve(target);
        figures.delete(target);
      } else if (target.clientWidth !== widths.get(target)) draw(target, figures.get(target));
    }
  });

  return { draw };
})();
