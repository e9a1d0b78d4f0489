// The script of every page: draws charts, shows and copies queries, fetches late panels, and
// follows a run that trains. It asks only this server.
"use strict";

const POLL_MS = 3000;

function draw(root) {
  for (const place of root.querySelectorAll(".chart:not([data-drawn])")) {
    place.dataset.drawn = "";
    const data = place.querySelector("script.chart-data");
    Bokeh.embed.embed_item(JSON.parse(data.textContent), place);
  }
}

async function fetchLater(root) {
  for (const place of root.querySelectorAll("[data-later]")) {
    const address = place.dataset.later;
    delete place.dataset.later;
    try {
      const answer = await fetch(address);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const panel = page.querySelector(".panel, .error");
      place.replaceWith(panel);
      draw(panel.parentNode);
    } catch (error) {
      place.querySelector(".empty").textContent = "The server does not answer.";
    }
  }
}

function toggleQuery(button) {
  const query = button.closest(".panel").querySelector(".sql");
  query.hidden = !query.hidden;
  button.setAttribute("aria-expanded", String(!query.hidden));
}

async function copy(button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch (error) {
    button.textContent = "Select the text and copy it";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

// Replaces the panels by those of the newest snapshot. Open queries stay open.
async function reload() {
  const open = [...document.querySelectorAll(".sql:not([hidden])")]
    .map((query) => query.closest(".panel").id);
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const scrolled = window.scrollY;
  const main = page.getElementById("main");
  document.getElementById("main").replaceWith(main);
  document.querySelector(".as-of").replaceWith(page.querySelector(".as-of"));
  const link = page.querySelector(".moment a.quiet");
  if (link) document.querySelector(".moment a.quiet").replaceWith(link);
  document.body.dataset.lsn = page.body.dataset.lsn;
  draw(main);
  for (const id of open) {
    const button = document.getElementById(id)?.querySelector(".sql-button");
    if (button) toggleQuery(button);
  }
  window.scrollTo(0, scrolled);
  document.dispatchEvent(new CustomEvent("gigpo-reloaded"));
  await fetchLater(main);
}

async function poll() {
  const newer = document.getElementById("newer");
  const follow = document.getElementById("follow");
  try {
    if (document.visibilityState === "visible") {
      const answer = await fetch(`/lsn?run=${document.body.dataset.run}`);
      const { lsn } = await answer.json();
      const isNewer = lsn !== Number(document.body.dataset.lsn);
      newer.textContent = `show LSN ${lsn}`;
      newer.hidden = !isNewer || follow?.checked;
      if (isNewer && follow?.checked && !isReading()) await reload();
    }
    document.body.classList.remove("is-away");
  } catch (error) {
    document.body.classList.add("is-away");
  }
  setTimeout(poll, POLL_MS);
}

// A reader who marks text, writes, or opened a long text is not disturbed.
function isReading() {
  const busy = document.activeElement?.matches("main input, main textarea, main select");
  return busy || String(getSelection()) !== "" || document.querySelector("main details[open]");
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.matches(".sql-button")) toggleQuery(button);
  if (button?.matches(".copy")) copy(button);
});

// A cell of a lane, or a part of a graph, shows its details, and marks what has the same state.
function showCell(cell) {
  const lanes = cell.closest(".lanes, .graph");
  const state = cell.dataset.state;
  for (const other of lanes.querySelectorAll("[data-cell]")) {
    const joins = other.dataset.state === state || other.dataset.to === state;
    other.classList.toggle("same", Boolean(state) && joins);
  }
  const cells = JSON.parse(lanes.querySelector("script.cells").textContent);
  const details = cells[cell.dataset.cell];
  const inspector = lanes.querySelector(".inspector");
  for (const place of inspector.querySelectorAll("[data-field]")) {
    place.textContent = details[place.dataset.field] ?? "–";
  }
  for (const link of inspector.querySelectorAll("a[data-link]")) {
    link.href = details[link.dataset.link] ?? "";
    link.hidden = !details[link.dataset.link];
  }
  inspector.classList.add("is-filled");
}

for (const kind of ["mouseover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    const cell = event.target.closest?.("[data-cell]");
    if (cell) showCell(cell);
  });
}

// An example replaces the query that is written.
document.addEventListener("change", (event) => {
  if (event.target.matches("select.examples") && event.target.value) {
    document.getElementById("query").value = event.target.value;
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.id === "query") {
    event.target.form.requestSubmit();
  }
});

document.addEventListener("DOMContentLoaded", () => {
  draw(document);
  fetchLater(document);
  document.querySelector("[data-scroll-here]")?.scrollIntoView();  // what the address asked for
  const follow = document.getElementById("follow");
  if (follow) {
    follow.checked = sessionStorage.getItem("follow") !== "no";
    follow.addEventListener("change", () => {
      sessionStorage.setItem("follow", follow.checked ? "yes" : "no");
    });
  }
  if ("live" in document.body.dataset) setTimeout(poll, POLL_MS);
});
