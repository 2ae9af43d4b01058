"use strict";
(() => {
  const tip = document.getElementById("tip");
  // the browser's own tips would show beside ours: their words move to where we read them
  for (const title of document.querySelectorAll("svg.figure title")) {
    const mark = title.parentNode;
    mark.dataset.tip = title.textContent;
    title.remove();
  }
  const hide = () => {
    tip.hidden = true;
    for (const line of document.querySelectorAll(".cursor")) line.remove();
  };
  const show = (words, event) => {
    tip.textContent = words;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = Math.min(Math.max(event.clientX + 14, 4), innerWidth - box.width - 4);
    const above = event.clientY - box.height - 14;
    tip.style.left = x + "px";
    tip.style.top = (above < 4 ? event.clientY + 18 : above) + "px";
  };
  const column = (area, event) => {
    const svg = area.ownerSVGElement;
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const tips = (area.tips = area.tips || area.dataset.tips.split("|"));
    const start = Number(area.dataset.start);
    const step = Number(area.dataset.step);
    const place = Math.min(Math.max(Math.floor((point.x - start) / step), 0), tips.length - 1);
    let line = svg.querySelector(".cursor");
    if (!line) {
      hide();
      line = document.createElementNS(svg.namespaceURI, "line");
      line.setAttribute("class", "cursor");
      svg.append(line);
    }
    const x = start + (place + 0.5) * step;
    const top = Number(area.getAttribute("y"));
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    line.setAttribute("y1", top);
    line.setAttribute("y2", top + Number(area.getAttribute("height")));
    return tips[place];
  };
  const follow = (event) => {
    const area = event.target.closest && event.target.closest("[data-tips], [data-tip]");
    if (!area) return hide();
    if (area.dataset.tips) return show(column(area, event), event);
    if (document.querySelector(".cursor")) hide();
    show(area.dataset.tip, event);
  };
  document.addEventListener("pointermove", follow);
  document.addEventListener("pointerdown", follow);
  document.addEventListener("scroll", hide, { passive: true, capture: true });

  const rows = (table) =>
    [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()).join("\t")).join("\n");
  for (const box of document.querySelectorAll(".copyable")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const table = box.querySelector("table");
      const words = table ? rows(table) : box.querySelector("pre").textContent;
      let done = true;
      try {
        await navigator.clipboard.writeText(words);
      } catch {
        getSelection().selectAllChildren(table || box.querySelector("pre"));
        done = document.execCommand("copy");
      }
      button.textContent = done ? "Copied" : "Selected: press Ctrl-C";
      setTimeout(() => (button.textContent = "Copy"), 1600);
    });
    box.append(button);
  }

  // what is folded away on the screen is printed
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });
})();
