// Tabs: only the selected panel is shown; keys follow the ARIA pattern (arrows, Home, End).
let tabGroups = 0;

function makeTabs(element) {
  const panels = [...element.children].filter((child) => child.classList.contains("panel"));
  const list = document.createElement("div");
  const group = ++tabGroups;
  list.className = "tablist";
  list.setAttribute("role", "tablist");
  if (element.dataset.name) list.setAttribute("aria-label", element.dataset.name);
  const tabs = panels.map((panel, i) => {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.id = `tab-${group}-${i + 1}`;
    tab.textContent = panel.firstElementChild.textContent;
    tab.setAttribute("role", "tab");
    panel.id = `panel-${group}-${i + 1}`;
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", tab.id);
    tab.setAttribute("aria-controls", panel.id);
    tab.addEventListener("click", () => choose(i));
    list.append(tab);
    return tab;
  });

  function choose(chosen) {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === chosen));
      tab.tabIndex = i === chosen ? 0 : -1;
      panels[i].hidden = i !== chosen;
    });
  }

  list.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const now = tabs.indexOf(document.activeElement), count = tabs.length;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: count - 1 }[event.key];
    if (now < 0 || next === undefined) return;
    event.preventDefault();
    choose((next + count) % count);
    tabs[(next + count) % count].focus();
  });
  choose(0);
  element.prepend(list);
  element.classList.add("ready");
}

for (const element of document.querySelectorAll(".tabs")) makeTabs(element);
