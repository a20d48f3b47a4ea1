/* Theme, contents and charts of every page. */
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const KEY = "rather-theme";

  function remembered() {
    try { return localStorage.getItem(KEY); } catch { return null; }  // a page from a file may have no storage
  }
  function remember(theme) {
    try { localStorage.setItem(KEY, theme); } catch { /* then it applies to this page only */ }
  }
  const theme = () => root.dataset.theme || (dark.matches ? "dark" : "light");

  function nameButton() {
    document.getElementById("theme").textContent = theme() === "dark" ? "Light theme" : "Dark theme";
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
      nameButton();
    });
    dark.addEventListener("change", nameButton);
    nameButton();
    for (const script of document.querySelectorAll("script.figure")) {
      rather.draw(script.closest("figure").querySelector(".plot"), JSON.parse(script.textContent));
    }
    follow();
    root.dataset.ready = "yes";
  });
})();
