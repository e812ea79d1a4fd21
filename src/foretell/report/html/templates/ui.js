"use strict";
// The form of the local page: asks this machine's own server, says how far it is, and goes to the report.
(() => {
  const form = document.getElementById("ask"), status = document.getElementById("status");
  const button = form.querySelector("button.go"), root = form.dataset.root;
  const filter = document.getElementById("filter"), chosen = document.getElementById("chosen");
  const choices = [...document.querySelectorAll("#choices label")];

  function count() {
    const names = choices.map((c) => c.querySelector("input")).filter((i) => i.checked).map((i) => i.value);
    chosen.textContent = names.length ? names.join(", ") : "none chosen";
  }
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const choice of choices) {
      const words = choice.textContent.toLowerCase();
      choice.hidden = !wanted.every((w) => words.includes(w));
    }
  });
  filter.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });
  form.addEventListener("change", count);
  count();

  function fail(message, repair) {
    const box = document.createElement("p"), what = document.createElement("b");
    box.className = "error";
    what.textContent = message;
    box.append(what, repair ? ` — ${repair}` : "");
    status.replaceChildren(box);
    button.disabled = false;
  }
  async function ask(path, options) {
    const answer = await fetch(root + path, { cache: "no-store", ...options });
    const kind = answer.headers.get("Content-Type") ?? "";
    const told = kind.includes("json") ? await answer.json() : { message: (await answer.text()).trim(), repair: "" };
    return { ok: answer.ok, told };
  }
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const sent = Object.fromEntries(new FormData(form));
    sent.devices = choices.map((c) => c.querySelector("input")).filter((i) => i.checked).map((i) => i.value);
    sent.alternatives = form.elements.alternatives.checked;
    if (sent.phase === "inference") delete sent.phase; // what goes without saying stays out of the command
    if (sent.precision === "fp32") delete sent.precision;
    button.disabled = true;
    status.textContent = "Asking …";
    try {
      let { ok, told } = await ask("predict", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent),
      });
      let shown = "";
      for (let wait = 100; ok && told.state === "running"; wait = Math.min(wait * 1.4, 1000)) {
        const words = told.seconds >= 5 ? `${told.stage} … ${5 * Math.floor(told.seconds / 5)} s` : `${told.stage} …`;
        if (words !== shown) { shown = words; status.textContent = words; } // said aloud once each
        await new Promise((done) => setTimeout(done, wait));
        ({ ok, told } = await ask(`job/${told.job}`));
      }
      if (!ok || told.state === "failed") fail(told.message, told.repair);
      else location.assign(`${root}report/${told.job}`);
    } catch {
      fail("The server does not answer", "is foretell ui still running in its terminal?");
    }
  });
  window.addEventListener("pageshow", () => { button.disabled = false; });
})();
