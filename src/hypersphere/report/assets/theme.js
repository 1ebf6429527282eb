// Light or dark theme: the last choice of the user, else that of the system. Runs in the head to avoid a flash.
// Listeners of "themechange" redraw synchronously, which printing relies on.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const key = "hypersphere-theme";

  const remembered = () => {
    try { return localStorage.getItem(key); } catch { return null; } // storage may be forbidden for local files
  };
  const remember = (theme) => {
    try { localStorage.setItem(key, theme); } catch { /* the choice is then lost with the page */ }
  };
  const preferred = () => remembered() ?? (system.matches ? "dark" : "light");

  function show(theme) {
    root.dataset.theme = theme;
    document.getElementById("theme")?.setAttribute("aria-pressed", String(theme === "dark"));
    dispatchEvent(new Event("themechange"));
  }

  show(preferred());
  system.addEventListener("change", () => show(preferred()));
  addEventListener("DOMContentLoaded", () => {
    show(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const theme = root.dataset.theme === "dark" ? "light" : "dark";
      remember(theme);
      show(theme);
    });
  });

  let before = null;
  addEventListener("beforeprint", () => { before = root.dataset.theme; show("light"); });
  addEventListener("afterprint", () => { if (before) show(before); });
})();
