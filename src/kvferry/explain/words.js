// Elements, colours and words that the views share.

const byId = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en-US");
const many = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  const shown = at && value < 100 ? value.toFixed(1) : number(Math.round(value));
  return `${shown} ${units[at]}`;
}

const HUES = [212, 28, 150, 338, 265, 185, 48, 0, 100, 300];
function tint(index, shade = 0) {
  const hue = index < HUES.length ? HUES[index] : (index * 137.5) % 360;
  const dark = document.documentElement.dataset.theme === "dark";
  const light = (dark ? [60, 50, 41, 33] : [42, 54, 66, 77])[shade % 4];
  return `hsl(${hue} ${dark ? 55 : 62}% ${light}%)`;
}

// Paler than the tints of sources, which mean something else.
function kindTint(index) {
  const dark = document.documentElement.dataset.theme === "dark";
  return `hsl(${(95 + index * 77) % 360} ${dark ? 22 : 34}% ${dark ? 32 - (index % 2) * 6 : 82 - (index % 2) * 6}%)`;
}

function swatch(kind, colour) {
  const element = make("span", { class: `swatch ${kind}` });
  if (colour) element.style.background = colour;
  return element;
}

const legendItem = (mark, text) => make("li", {}, mark, text);

function reachWords(reach) {
  if (reach.type === "window") return `the last ${number(reach.tokens)} tokens`;
  if (reach.type === "chunk") return `the current chunk of ${number(reach.tokens)} tokens`;
  return "every earlier token";
}

const partsWords = (layer) => layer.parts.map((p) => p.name).join(" ");

function kindOf(layer) {
  if (!layer.group.paging.tokens) return `${partsWords(layer)}, one state`;
  return `${partsWords(layer)}, ${reachWords(layer.reach)}`;
}

// A radio group with one stop for the Tab key.
function roving(items, choose) {
  const usable = () => items.filter((item) => !item.disabled);
  items.forEach((item) => {
    item.addEventListener("click", () => choose(items.indexOf(item)));
    item.addEventListener("keydown", (event) => {
      const all = usable();
      const at = all.indexOf(item);
      const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
      if (event.key === " " || event.key === "Enter") choose(items.indexOf(item));
      else if (to === undefined) return;
      else if (all[to]) {
        all[to].focus();
        choose(items.indexOf(all[to]));
      }
      event.preventDefault();
    });
  });
}
