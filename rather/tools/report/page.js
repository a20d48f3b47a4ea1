"use strict";
/* Theme and charts of every page. `rather.draw(element, figure)` draws a chart, and again after each theme change. */
const rather = (() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const KEY = "rather-theme";
  const drawn = new Map();
  const colours = new Map();  // of the current theme: looking one up costs a layout of the whole page

  function remembered() {
    try { return localStorage.getItem(KEY); } catch { return null; }  // a page from a file may have no storage
  }
  function remember(theme) {
    try { localStorage.setItem(KEY, theme); } catch { /* then it applies to this page only */ }
  }
  const theme = () => root.dataset.theme || (dark.matches ? "dark" : "light");

  /* A variable of the style sheet as the colour that it is in this theme. */
  function colour(name) {
    if (colours.has(name)) return colours.get(name);
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
    return colours.get(name);
  }

  function template() {
    const line = colour("--line"), text = colour("--text"), muted = colour("--muted");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, title: { standoff: 8 } };
    const series = [1, 2, 3, 4, 5, 6, 7, 8].map((number) => colour(`--series-${number}`));
    return { layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: series,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: muted },
      margin: { l: 44, r: 12, t: 12, b: 40 }, xaxis: axis, yaxis: axis, hovermode: "x unified", bargap: 0.08,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: text } },
      hoverlabel: { bgcolor: colour("--surface"), bordercolor: line, font: { color: text } },
    } };
  }

  /* The figure with each "var(--name)" replaced by its colour. */
  function coloured(value) {
    if (typeof value === "string") {
      const found = /^var\((--[\w-]+)\)$/.exec(value);
      return found ? colour(found[1]) : value;
    }
    if (Array.isArray(value)) return value.length && typeof value[0] === "number" ? value : value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each)]));
    }
    return value;
  }

  /* plotly would make a link of <a href=...> in a name, which may come from data. */
  function literal(trace) {
    return "name" in trace ? { ...trace, name: String(trace.name).replaceAll("&", "&amp;").replaceAll("<", "&lt;") } : trace;
  }

  function draw(element, figure) {
    drawn.set(element, figure);
    const finger = matchMedia("(pointer: coarse)").matches;  // there a drag scrolls the page
    const layout = { template: template(), dragmode: finger ? false : "zoom", autosize: true, ...coloured(figure.layout || {}) };
    return Plotly.react(element, coloured(figure.data).map(literal), layout, { responsive: true, displayModeBar: false });
  }

  function retheme() {
    colours.clear();
    const button = document.getElementById("theme");
    button.textContent = theme() === "dark" ? "Light theme" : "Dark theme";
    for (const [element, figure] of drawn) {
      if (element.isConnected) draw(element, figure);
      else drawn.delete(element);
    }
  }

  /* Mark the part of the page that is at the top of the window in the list of contents. */
  function follow() {
    const links = [...document.querySelectorAll(".contents a")];
    const parts = links.map((link) => document.getElementById(link.hash.slice(1)));
    const mark = () => {
      const above = (part) => scrollY > 0 && part.getBoundingClientRect().top < innerHeight / 3;
      const passed = parts.filter(above).length;
      links.forEach((link, place) => {
        if (place !== Math.max(0, passed - 1)) link.removeAttribute("aria-current");
        else if (!link.hasAttribute("aria-current")) {
          link.setAttribute("aria-current", "true");
          const bar = link.closest(".contents");
          bar.scrollLeft = link.offsetLeft - bar.clientWidth / 3;
        }
      });
    };
    if (!links.length) return;
    addEventListener("scroll", mark, { passive: true });
    new ResizeObserver(mark).observe(document.body);  // parts that are filled later move the others
  }

  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = theme() === "dark" ? "light" : "dark";
      remember(root.dataset.theme);
      retheme();
    });
    dark.addEventListener("change", retheme);
    retheme();
    for (const script of document.querySelectorAll("script.figure")) {
      draw(script.closest("figure").querySelector(".plot"), JSON.parse(script.textContent));
    }
    follow();
    root.dataset.ready = "yes";
  });
  return { draw, colour, theme };
})();
