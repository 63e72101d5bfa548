"use strict";
// Every value goes into the page as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const PAGE = 100;
const body = document.querySelector("#plans tbody");
const head = document.querySelector("#plans thead tr");
const search = document.getElementById("search");
const count = document.getElementById("count");
const more = document.getElementById("more");
const when = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ");
const SHOWN = {
  seconds: (value) => value.toFixed(2),
  size: (value) => (value / 1024).toFixed(1),
  count: (value) => value.toLocaleString("en"),
  time: (value) => when(value).slice(0, 10),
  text: (value) => value,
  key: (value) => value.slice(0, 12),
  wide: (value) => value,
  part: (value) => value.slice(value.lastIndexOf(".") + 1),
};
const isNumber = (column) => ["seconds", "size", "count"].includes(column.kind);
const texts = data.rows.map((row) =>
  data.columns.map((column, place) => (typeof row[place] === "string" ? row[place] : "")).join("\n").toLowerCase().replaceAll("×", "x"));
const state = { by: data.columns.findIndex((column) => column.name === "created"), down: true, shown: PAGE };

function found() {
  const words = search.value.toLowerCase().replaceAll("×", "x").split(/\s+/).filter(Boolean);
  const places = [];
  texts.forEach((text, place) => { if (words.every((word) => text.includes(word))) places.push(place); });
  const direction = state.down ? -1 : 1;
  return places.sort((one, two) => {
    const a = data.rows[one][state.by], b = data.rows[two][state.by];
    const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
    return direction * order || one - two;
  });
}

function line(row) {
  const tr = document.createElement("tr");
  data.columns.forEach((column, place) => {
    const td = document.createElement("td");
    const text = SHOWN[column.kind](row[place]);
    if (isNumber(column)) td.className = "number";
    if (column.kind === "time") td.title = when(row[place]) + " UTC";
    if (["key", "wide", "part"].includes(column.kind)) { td.className = column.kind; td.title = row[place]; }
    const drawing = row[data.columns.length];
    if (column.kind === "wide" && drawing !== null) {
      const a = document.createElement("a");
      a.href = "#" + drawing;
      a.textContent = text;
      td.append(a);
    } else {
      td.textContent = text;
    }
    tr.append(td);
  });
  return tr;
}

function draw() {
  const places = found();
  body.replaceChildren(...places.slice(0, state.shown).map((place) => line(data.rows[place])));
  count.textContent = `${places.length.toLocaleString("en")} of ${data.rows.length.toLocaleString("en")}`;
  more.hidden = places.length <= state.shown;
  [...head.children].forEach((th, place) => {
    if (place === state.by) th.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
  });
}

function open() {
  const target = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  if (target instanceof HTMLDetailsElement) { target.open = true; target.scrollIntoView(); }
}

data.columns.forEach((column, place) => {
  const th = document.createElement("th");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = column.title;
  button.addEventListener("click", () => {
    state.down = state.by === place ? !state.down : isNumber(column) || column.kind === "time";
    state.by = place;
    draw();
  });
  if (isNumber(column)) th.className = "number";
  th.scope = "col";
  th.append(button);
  head.append(th);
});
search.addEventListener("input", () => { state.shown = PAGE; draw(); });
more.addEventListener("click", () => { state.shown += 10 * PAGE; draw(); });
window.addEventListener("hashchange", open);
draw();
open();
