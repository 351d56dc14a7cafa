// The page: lists of ops as they are edited, and what the worker says of them. It knows nothing of schedules itself.
//
//   settings --build--> stages, a list of ops each --edit--> check --> refused, or figures and a picture
//
// An op is a string of JSON, as playground.py writes it. `data-state` and `data-change-ms` of the body say how it went.

const $ = (id) => document.getElementById(id);
const form = $("settings");
const body = document.body;

const shared = {}; // choices of the library, and the models that are listed
const state = {
  settings: null,
  stages: [], // of each stage its ops
  built: [], // as the builder made them
  names: { units: [], visits: [] },
  base: null, // figures of what was built
  result: null,
  stage: 0,
  chosen: 0, // number of the chosen op, in its stage
  undo: [],
  redo: [],
  zoom: 1,
};

// ---- asks the worker

const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let asked = 0;

worker.onmessage = ({ data }) => {
  if (data.progress) $("progress").textContent = data.progress;
  else if (data.failed) fail(data.failed);
  else if (data.ready) begin().catch((error) => fail(error.message));
  else {
    waiting.get(data.id)(data);
    waiting.delete(data.id);
  }
};
worker.onerror = (event) => fail(event.message || "the worker did not start");

async function ask(method, ...given) {
  const id = ++asked;
  const late = setTimeout(() => body.classList.add("busy"), 200);
  const { answer, ms } = await new Promise((resolve) => {
    waiting.set(id, resolve);
    worker.postMessage({ id, method, given });
  });
  clearTimeout(late);
  if (!waiting.size) body.classList.remove("busy");
  body.dataset.pythonMs = ms.toFixed(1);
  const found = JSON.parse(answer);
  if (found && found.error) throw new Error(found.error);
  return found;
}

function fail(why) {
  body.dataset.state = "error";
  $("verdict").replaceChildren(element("p", {}, element("strong", {}, "It does not work here")), element("p", {}, why));
}

// ---- begins

async function begin() {
  $("progress").textContent = "Building a first program";
  const listed = await (await fetch("traces/index.json")).json();
  shared.choices = await ask("choices");
  shared.models = new Map(listed.map((model) => [model.file, model]));
  fill(form.trace, listed.map((model) => [model.file, `${model.title}, ${model.about}`]));
  fill(form.cluster, shared.choices.clusters);
  fill(form.builder, Object.keys(shared.choices.builders));
  fill(form.order, shared.choices.orders);
  const given = await opened(location.hash);
  const first = given ? given.settings : { trace: listed[0].file, builder: "zero3", order: "one_f_one_b", stages: 1, microbatches: 1 };
  if (!given) first.gpus = listed[0].gpus;
  for (const name of ["trace", "cluster", "builder", "order", "gpus", "microbatches", "stages"]) if (name in first) form[name].value = first[name];
  showOptions(given ? given.settings.options : {});
  await build(given ? given.settings.mesh : "");
  if (given && given.stages) await edited(given.stages);
  for (const id of ["import", "export", "link", "edit", "copy", "delete", "up", "down", "in", "out"]) $(id).disabled = false;
}

function fill(select, values) {
  select.replaceChildren(...values.map((value) => (Array.isArray(value) ? new Option(value[1], value[0]) : new Option(value, value))));
}

// ---- settings: what is built

function readSettings() {
  const options = {};
  for (const input of $("options").querySelectorAll("[name]")) {
    options[input.name] = input.type === "checkbox" ? input.checked : input.type === "number" ? Number(input.value) : input.value.trim();
  }
  const { trace, cluster, builder, order, mesh } = form;
  const numbers = Object.fromEntries(["gpus", "microbatches", "stages"].map((name) => [name, Number(form[name].value)]));
  return { trace: trace.value, cluster: cluster.value, builder: builder.value, order: order.value, mesh: mesh.value, options, ...numbers };
}

function showOptions(given = {}) {
  const known = shared.choices.builders[form.builder.value] ?? [];
  $("options").replaceChildren(...known.map(([name, usual]) => {
    const value = given[name] ?? usual;
    if (typeof usual === "boolean") {
      return element("label", { class: "check" }, element("input", { type: "checkbox", name, checked: value }), name);
    }
    const input = typeof usual === "number"
      ? element("input", { type: "number", name, min: 0, value })
      : element("input", { type: "text", name, value, list: `${name}-values`, size: 9 });
    const values = name === "remat" ? [element("datalist", { id: "remat-values" }, ...["none", "all", "offload", "first:4", "every:2"].map((each) => new Option(each)))] : [];
    return element("label", {}, `${name} `, input, ...values);
  }));
}

async function showMeshes(wanted) {
  const meshes = form.builder.value ? await ask("meshes", readSettings()) : [];
  fill(form.mesh, meshes);
  if (meshes.includes(wanted)) form.mesh.value = wanted;
  document.querySelector("[data-for=mesh]").hidden = meshes.length < 2;
}

async function open(model) {
  if (model.opened) return;
  const found = await fetch(`traces/${model.file}`);
  if (!found.ok) throw new Error(`traces/${model.file}: ${found.status} ${found.statusText}`);
  await ask("open", model.file, await found.text(), model.tokens);
  model.opened = true;
}

let builds = 0;

async function build(wanted = form.mesh.value) {
  for (const name of ["gpus", "microbatches", "stages", "order"]) form[name].disabled = form.builder.value === "";
  const begun = performance.now();
  const turn = ++builds;
  document.querySelector("[data-for=stages]").hidden = Number(form.stages.value) < 2;
  try {
    await open(shared.models.get(form.trace.value));
    await showMeshes(wanted);
    const settings = readSettings();
    const found = await ask("build", settings);
    if (turn !== builds) return; // another one has been asked for
    const same = JSON.stringify(found.stages) === JSON.stringify(state.built);
    const kept = same && isEdited() ? state.stages : null; // of other figures alone: the edits stay
    Object.assign(state, { settings, built: found.stages, names: { units: found.units, visits: found.visits }, base: found.figures ?? null });
    if (!same) {
      const all = found.stages.length;
      Object.assign(state, { undo: [], redo: [], stage: Math.min(state.stage, all - 1), chosen: 0, zoom: 1 });
    }
    state.stages = kept ?? found.stages;
    show(kept ? await ask("check", kept) : found, begun);
  } catch (error) {
    if (turn === builds) refuseSettings(error.message, begun);
  }
}

function refuseSettings(why, begun) {
  body.dataset.state = "error";
  $("verdict").replaceChildren(element("p", {}, element("strong", {}, "That cannot be built")), element("p", {}, why));
  stale(true);
  measure(begun);
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", ({ target }) => {
  if (target === form.trace) {
    const model = shared.models.get(form.trace.value);
    form.gpus.value = model.gpus;
    lock(model);
  }
  if (target === form.builder) showOptions();
  if (target === form.stages && Number(form.stages.value) > 1 && Number(form.microbatches.value) < 2) form.microbatches.value = 2 * form.stages.value;
  build();
});

// an imported program with ops is shown as it is: without a builder there is nothing to choose but the cluster
function lock(model) {
  const own = Boolean(model.program);
  if (own !== (form.builder.options[0].value === "")) {
    fill(form.builder, [...(own ? [["", "as imported"]] : []), ...Object.keys(shared.choices.builders)]);
    if (!own) form.builder.value = "zero3";
    showOptions();
  }
}

// ---- edits: a new list of ops, which the worker judges

const isEdited = () => JSON.stringify(state.stages) !== JSON.stringify(state.built);

async function edited(stages) {
  const begun = performance.now();
  state.stages = stages;
  const mine = ++builds;
  try {
    const result = await ask("check", stages);
    if (mine === builds) show(result, begun);
  } catch (error) {
    if (mine !== builds) return;
    body.dataset.state = "error";
    $("verdict").replaceChildren(element("p", {}, element("strong", {}, "That is no op")), element("p", {}, error.message));
    stale(true);
    measure(begun);
  }
}

function change(ops, chosen = state.chosen) {
  state.undo.push([state.stages, state.stage, state.chosen]);
  state.redo = [];
  state.chosen = Math.max(0, Math.min(chosen, ops.length - 1));
  return edited(withOps(ops));
}

function back(from, to) {
  if (!from.length) return;
  to.push([state.stages, state.stage, state.chosen]);
  const [stages, stage, chosen] = from.pop();
  Object.assign(state, { stage, chosen });
  edited(stages);
}

const ops = () => state.stages[state.stage];

function moved(from, to) {
  const list = [...ops()];
  list.splice(to, 0, ...list.splice(from, 1));
  return list;
}

function move(from, to) {
  if (from !== to && to >= 0 && to < ops().length) change(moved(from, to), to);
}

const withOps = (list) => state.stages.map((each, stage) => (stage === state.stage ? list : each));

const actions = {
  undo: () => back(state.undo, state.redo),
  redo: () => back(state.redo, state.undo),
  reset: () => { if (isEdited()) { state.undo.push([state.stages, state.stage, state.chosen]); state.redo = []; edited(state.built); } },
  up: () => move(state.chosen, state.chosen - 1),
  down: () => move(state.chosen, state.chosen + 1),
  delete: () => { if (ops().length) change(ops().toSpliced(state.chosen, 1)); },
  copy: () => { if (ops().length) change(ops().toSpliced(state.chosen, 0, ops()[state.chosen]), state.chosen + 1); },
  edit: () => openEditor(),
  in: () => zoom(1.6),
  out: () => zoom(1 / 1.6),
  import: () => $("file").click(),
  export: async () => download("program.json", await ask("save", state.stages)),
  link: async () => {
    const hash = await packed();
    history.replaceState(null, "", hash);
    await navigator.clipboard?.writeText(location.href);
    $("link").textContent = "Copied";
    setTimeout(() => ($("link").textContent = "Copy link"), 1200);
  },
};
for (const [id, act] of Object.entries(actions)) $(id).addEventListener("click", act);

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea")) return;
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") {
    event.preventDefault();
    actions[event.shiftKey ? "redo" : "undo"]();
  }
});

$("ops").addEventListener("keydown", (event) => {
  if (event.target !== $("ops") || event.ctrlKey || event.metaKey || !ops()?.length) return;
  const step = { ArrowUp: -1, ArrowDown: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
  const act = { Delete: "delete", Backspace: "delete", Enter: "edit", d: "copy", D: "copy" }[event.key];
  if (step && event.altKey) actions[step < 0 ? "up" : "down"]();
  else if (step) choose(state.stage, Math.max(0, Math.min(ops().length - 1, state.chosen + step)), true);
  else if (act) actions[act]();
  else return;
  event.preventDefault();
});

// ---- shows a result

function show(result, begun) {
  state.result = result;
  showStages();
  showOps();
  showResult(result);
  $("undo").disabled = !state.undo.length;
  $("redo").disabled = !state.redo.length;
  $("reset").disabled = !isEdited();
  measure(begun);
}

function showResult(result, edited = isEdited()) {
  const { refused, figures } = result;
  body.dataset.state = refused ? "refused" : "right";
  body.dataset.rule = refused?.rule ?? "";
  showVerdict(result, edited);
  if (figures) {
    showFigures(figures, edited);
    showPicture(result.picture);
    showDetails(figures);
  }
  stale(!figures);
}

function measure(begun) {
  requestAnimationFrame(() => {
    document.documentElement.getBoundingClientRect(); // the new picture is laid out
    body.dataset.changeMs = (performance.now() - begun).toFixed(1);
    body.dataset.changes = Number(body.dataset.changes ?? 0) + 1;
  });
}

const stale = (yes) => { for (const id of ["picture", "figures", "details"]) $(id).classList.toggle("stale", yes); };

function showVerdict({ refused, unknown, figures }, edited) {
  if (unknown) {
    $("verdict").replaceChildren(element("p", {}, element("strong", {}, "Right"), ", and its time is not known"), element("p", { class: "sentence" }, unknown));
  } else if (!refused) {
    const compared = state.base && edited ? difference(figures.step_s / state.base.step_s - 1) : "";
    $("verdict").replaceChildren(
      element("p", {}, element("strong", {}, "Right"), `: ${figures.step} a step${compared && `, ${compared}`}`, figures.peak > figures.budget ? "; it needs more memory than a rank has" : ""),
      element("p", { class: "sentence" }, `Every rule holds. Compute is busy for ${percent(figures.busy)} of the step; idle${figures.bubble === null ? "" : ", over all stages"}: ${figures.idle}. The bound: ${figures.least}.`),
    );
  } else {
    const rows = refused.uses.slice(1).map((line) => usesRow(line, refused.stage));
    $("verdict").replaceChildren(
      element("p", {}, element("strong", {}, "Refused"), ` by rule ‘${refused.rule}’: ${refused.sentence}`),
      element("p", {}, `${refused.at}: ${refused.why}`),
      ...(rows.length ? [element("table", {}, element("caption", { style: "text-align: left" }, refused.uses[0].trim()), element("tbody", {}, ...rows))] : []),
    );
  }
}

function usesRow(line, stage) {
  const [, use, op, words, mark] = line.match(/^ *(\S*)\s+(?:op (\d+))?\s*(.*?)\s*(<- .*)?$/);
  const row = element("tr", { class: mark?.includes("refused") ? "refused" : mark ? "against" : "" }, ...[use, op ?? "", words, mark ?? ""].map((text) => element("td", {}, text)));
  if (op) {
    row.dataset.op = op;
    row.addEventListener("click", () => choose(stage, Number(op), true));
  }
  return row;
}

const percent = (part) => `${(100 * part).toFixed(part > 0.1 ? 0 : 1)}%`;

function difference(part) {
  if (Math.abs(part) < 5e-5) return "as fast as it was built";
  return `${(100 * Math.abs(part)).toFixed(Math.abs(part) < 0.001 ? 2 : 1)}% ${part < 0 ? "faster" : "slower"} than it was built`;
}

function nbytes(count) {
  const unit = count >= 2 ** 30 ? ["GiB", 2 ** 30] : count >= 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
  const value = count / unit[1];
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit[0]}`;
}

function showFigures(found, edited) {
  const base = edited ? state.base : null;
  const delta = (now, then) => {
    if (!then || Math.abs(now / then - 1) < 5e-5) return [];
    const part = now / then - 1;
    return [element("small", { class: part < 0 ? "better" : "worse" }, `${part < 0 ? "−" : "+"}${Math.abs(100 * part).toFixed(Math.abs(part) < 0.001 ? 2 : 1)}%`)];
  };
  const wire = (figures) => figures.wire.reduce((sum, [, count]) => sum + count, 0);
  const tile = (name, value, ...more) => element("div", {}, element("dt", {}, name), element("dd", {}, value), ...more);
  const fits = found.peak <= found.budget;
  $("figures").replaceChildren(
    tile("Step", found.step, ...delta(found.step_s, base?.step_s)),
    ...(found.tokens_per_s ? [tile("Tokens a second", Math.round(found.tokens_per_s).toLocaleString("en"))] : []),
    tile("Bound by", found.bound, element("small", {}, found.headroom)),
    ...(found.bubble === null ? [] : [tile("Bubble", percent(found.bubble), ...delta(found.bubble, base?.bubble))]),
    tile("Memory", nbytes(found.peak), element("small", { class: fits ? "" : "worse" }, `${fits ? "of" : "does not fit into"} ${nbytes(found.budget)}`), ...delta(found.peak, base?.peak)),
    tile("Sent by a rank", nbytes(wire(found)), ...delta(wire(found), base && wire(base))),
  );
}

function showDetails({ memory, wire, at, peak }) {
  const block = (title, note, items) => {
    const most = Math.max(...items.map(([, count]) => count), 1);
    const rows = items.map(([name, count]) => element("div", { class: "item" }, element("span", {}, name), element("span", { class: "meter" }, element("i", { style: `width: ${(100 * count) / most}%` })), element("span", {}, nbytes(count))));
    return element("div", {}, element("h3", {}, title, " ", element("small", {}, note)), ...rows);
  };
  const worth = memory.filter(([, count]) => count > peak / 2000).sort((a, b) => b[1] - a[1]);
  $("details").replaceChildren(block("Memory of a rank", `most at ${at}`, worth), ...(wire.length ? [block("Sent by a rank", "in a step", wire)] : []));
}

// ---- the list of ops

function showStages() {
  const several = state.stages.length > 1;
  $("count").textContent = `${ops().length} ops${several ? ` on stage ${state.stage}` : ""}${isEdited() ? ", edited" : ""}`;
  $("stages").replaceChildren(...(several ? state.stages : []).map((_, stage) => {
    const wrong = state.result.refused?.stage === stage;
    const tab = element("button", { role: "tab", "aria-selected": stage === state.stage, class: wrong ? "wrong" : "" }, `${stage}`);
    tab.addEventListener("click", () => choose(stage, 0, true));
    return tab;
  }));
}

function showOps() {
  const rows = state.result.rows[state.stage];
  const streams = ["gather", "compute", "reduce", "replicate", "offload", "send", "receive"].filter((name) => rows.some(([stream]) => stream === name));
  const indent = Math.min(64, (0.3 * $("ops").clientWidth) / Math.max(1, streams.length - 1)); // px
  $("streams").style.setProperty("--indent", `${indent}px`);
  $("streams").hidden = indent < 46; // names would run into each other
  $("streams").replaceChildren(...streams.map((name) => element("span", {}, name)));
  const { refused } = state.result;
  const here = refused && refused.stage === state.stage ? refused : null;
  const items = rows.map(([stream, words, colour], number) => {
    const mark = number === here?.op ? " refused" : number === here?.against ? " against" : "";
    const style = `background:${colour};margin-left:${streams.indexOf(stream) * indent}px`;
    const of = { role: "option", id: `op-${number}`, class: `op${mark}`, "data-op": number, title: words, "aria-selected": number === state.chosen };
    return element("li", of, element("b", {}, number), element("i", { style }), element("span", {}, words));
  });
  const { scrollTop } = $("ops");
  const active = document.activeElement;
  $("ops").replaceChildren(...items);
  $("ops").scrollTop = scrollTop;
  $("ops").setAttribute("aria-activedescendant", `op-${state.chosen}`);
  if (editor) {
    placeEditor();
    if (editor.row.contains(active)) active.focus({ preventScroll: true }); // it has left the page for a moment
    return;
  }
  reveal(state.chosen);
  // what is refused may be far from what has been edited, which stays in sight
  if (here?.op >= 0 && Math.abs(here.op - state.chosen) < $("ops").clientHeight / 22 - 4) reveal(here.op);
}

const rowOf = (number) => $("ops").querySelector(`[data-op="${number}"]`);

function reveal(number) {
  const row = rowOf(number);
  const list = $("ops");
  if (!row) return;
  if (row.offsetTop < list.scrollTop + 22) list.scrollTop = row.offsetTop - 44;
  else if (row.offsetTop > list.scrollTop + list.clientHeight - 44) list.scrollTop = row.offsetTop - list.clientHeight + 66;
}

function choose(stage, number, scroll) {
  closeEditor();
  const other = stage !== state.stage;
  Object.assign(state, { stage, chosen: number });
  if (other) {
    showStages();
    showOps();
  }
  for (const row of $("ops").querySelectorAll('[aria-selected="true"]')) row.setAttribute("aria-selected", "false");
  rowOf(number)?.setAttribute("aria-selected", "true");
  $("ops").setAttribute("aria-activedescendant", `op-${number}`);
  if (scroll) reveal(number);
  outlineChosen();
}

$("ops").addEventListener("dblclick", (event) => { if (event.target.closest("li.op")) openEditor(); });

// what is under way while an op is dragged: the list as it would be, judged before it is dropped; null: as it is

const drag = { on: false, asking: false, next: undefined };

async function glance(list) {
  drag.next = list;
  if (drag.asking) return;
  drag.asking = true;
  while (drag.next !== undefined) {
    const wanted = drag.next;
    drag.next = undefined;
    const result = wanted ? await ask("check", withOps(wanted)) : state.result;
    if (drag.on && drag.next === undefined) showResult(result, wanted ? true : isEdited());
  }
  drag.asking = false;
}

// dragging: by the mouse anywhere on a row, by touch on its number
$("ops").addEventListener("pointerdown", (event) => {
  const row = event.target.closest("li.op");
  if (!row || event.button !== 0) return;
  const from = Number(row.dataset.op);
  choose(state.stage, from, false);
  $("ops").focus({ preventScroll: true });
  if (event.pointerType !== "mouse" && !event.target.closest("b")) return;
  const list = $("ops");
  const line = element("div", { class: "drop" });
  let to = null; // the gap that it would go to
  let last = event.clientY;
  const at = () => Math.max(0, Math.min(ops().length, Math.round((last - list.getBoundingClientRect().top + list.scrollTop - 4) / 22)));
  const place = () => (to > from ? to - 1 : to);
  const follow = () => {
    const gap = at();
    if (gap === to) return;
    to = gap;
    line.style.top = `${to * 22 + 4}px`;
    glance(place() === from ? null : moved(from, place()));
  };
  const scrolling = setInterval(() => {
    if (to === null) return;
    const { top, bottom } = list.getBoundingClientRect();
    const near = last < top + 30 ? -14 : last > bottom - 30 ? 14 : 0;
    if (near) list.scrollTop += near;
    follow();
  }, 30);
  const onMove = (now) => {
    last = now.clientY;
    if (to === null && Math.abs(last - event.clientY) < 5) return;
    if (to === null) {
      row.classList.add("dragged");
      list.classList.add("dragging");
      list.append(line);
      drag.on = true;
    }
    follow();
  };
  const done = (now) => {
    clearInterval(scrolling);
    list.removeEventListener("pointermove", onMove);
    for (const name of ["pointerup", "pointercancel"]) list.removeEventListener(name, done);
    row.classList.remove("dragged");
    list.classList.remove("dragging");
    line.remove();
    drag.on = false;
    if (now.type === "pointerup" && to !== null && place() !== from) move(from, place());
    else if (to !== null) showResult(state.result);
  };
  list.setPointerCapture(event.pointerId);
  list.addEventListener("pointermove", onMove);
  for (const name of ["pointerup", "pointercancel"]) list.addEventListener(name, done);
});

// ---- the editor of one op: a field for each of its numbers, judged as they are typed

let editor = null; // { row, before: what to return to, number }

function openEditor() {
  closeEditor();
  if (!ops().length) return;
  const number = state.chosen;
  editor = { number, before: state.stages, row: element("li", { class: "editor" }) };
  drawEditor(JSON.parse(ops()[number]));
  placeEditor();
  editor.row.querySelector("[data-field]")?.focus();
}

function placeEditor() {
  rowOf(editor.number)?.after(editor.row);
}

function closeEditor(revert = false) {
  if (!editor) return;
  const { before, row } = editor;
  const changed = before !== state.stages;
  editor = null;
  row.remove();
  if (revert && changed) edited(before);
  else if (changed) {
    state.undo.push([before, state.stage, state.chosen]);
    state.redo = [];
    $("undo").disabled = false;
  }
}

function drawEditor([kind, ...values]) {
  const kinds = element("select", { "data-kind": "" });
  fill(kinds, Object.keys(shared.choices.ops));
  kinds.value = kind;
  const fields = shared.choices.ops[kind].map(([name, how, usual], at) => inputOf(name, how, values[at] ?? usual));
  const inside = element("form", {}, element("label", {}, "op ", kinds), ...fields, element("button", { type: "submit" }, "Done"));
  inside.addEventListener("submit", (event) => {
    event.preventDefault();
    closeEditor();
    $("ops").focus();
  });
  inside.addEventListener("input", ({ target }) => {
    if (target === kinds) {
      const fresh = shared.choices.ops[kinds.value].map(([, how, usual]) => usual ?? (Array.isArray(how) ? how[0] : how === "units" ? [0] : how === "numbers" ? [0] : how === "truth" ? true : how === "number or none" ? null : 0));
      drawEditor([kinds.value, ...fresh]);
    }
    const op = readEditor(kinds.value);
    if (op) edited(withOps(ops().with(editor.number, JSON.stringify(op))));
  });
  inside.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      closeEditor(true);
      $("ops").focus();
    }
    event.stopPropagation();
  });
  editor.row.replaceChildren(inside);
}

function inputOf(name, how, value) {
  const field = { "data-field": name, "data-how": Array.isArray(how) ? "choice" : how };
  const label = (input) => element("label", {}, `${name.replace("_", " ")} `, input);
  if (Array.isArray(how) || how === "visit") {
    const select = element("select", field);
    fill(select, Array.isArray(how) ? how : state.names.visits.map((visit, number) => [number, visit]));
    select.value = value ?? "";
    return label(select);
  }
  if (how === "truth") return element("label", { class: "check" }, element("input", { ...field, type: "checkbox", checked: value }), name);
  if (how === "number") return label(element("input", { ...field, type: "number", value: value ?? 0 }));
  const text = how === "units" ? (value ?? []).map((unit) => state.names.units[unit] ?? unit).join(", ") : how === "numbers" ? (value ?? []).join(", ") : (value ?? "");
  return label(element("input", { ...field, type: "text", value: text, spellcheck: false, placeholder: how === "number or none" ? "none" : "" }));
}

function readEditor(kind) {
  const values = [kind];
  let right = true;
  for (const input of editor.row.querySelectorAll("[data-field]")) {
    const how = input.dataset.how;
    const words = input.value.split(",").map((word) => word.trim()).filter(Boolean);
    let value;
    if (how === "truth") value = input.checked;
    else if (how === "choice") value = input.value;
    else if (how === "visit" || how === "number") value = Number(input.value);
    else if (how === "number or none") value = words.length ? Number(words[0]) : null;
    else value = words.map((word) => (how === "units" && state.names.units.includes(word) ? state.names.units.indexOf(word) : Number(word)));
    const wrong = [value].flat().some((each) => typeof each === "number" && !Number.isInteger(each));
    input.setCustomValidity?.(wrong ? "expected whole numbers, or names of units" : "");
    right &&= !wrong;
    values.push(value);
  }
  return right ? values : null;
}

// ---- the picture: boxes in parts of the step, lanes in inches, as the library lays them out

const INCH = 84;
const LEFT = 76;
const CLEAR = 6; // pixels between two labels, as wide as a digit: numbers that are nearer read as one
let canvas = null; // 2d context that measures text

function wide(text) {
  canvas ??= Object.assign(document.createElement("canvas").getContext("2d"), { font: "10.5px system-ui, sans-serif" });
  return canvas.measureText(text).width;
}

function zoom(by) {
  const scroll = $("scroll");
  const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / scroll.scrollWidth;
  state.zoom = Math.max(1, Math.min(40, state.zoom * by));
  if (state.picture) showPicture(state.picture);
  scroll.scrollLeft = middle * scroll.scrollWidth - scroll.clientWidth / 2;
}

function showPicture(picture) {
  state.picture = picture;
  const across = Math.max(320, $("scroll").clientWidth - LEFT - 8) * state.zoom;
  const x = (part) => LEFT + part * across;
  const y = (inches) => 4 + inches * INCH;
  const high = y(picture.height) + 34;
  const stripe = svg("line", { y2: 6, stroke: "#1b1f24", "stroke-opacity": 0.45, "stroke-width": 1.4 });
  const pattern = { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  const out = [svg("defs", {}, svg("pattern", pattern, stripe))];
  for (const { at, text } of ticks(picture.seconds, across)) {
    out.push(svg("line", { class: "grid", x1: x(at), x2: x(at), y1: 0, y2: y(picture.height) }));
    out.push(svg("text", { class: "tick", x: x(at), y: y(picture.height) + 14, "text-anchor": at ? "middle" : "start" }, text));
  }
  const names = [svg("rect", { class: "side", width: LEFT, height: high })]; // beside the lanes, wherever that scrolls to
  for (const [name, top, height, large] of picture.lanes) {
    out.push(svg("rect", { class: "floor", x: LEFT, y: y(top), width: across, height: height * INCH }));
    names.push(svg("text", { class: large ? "name big" : "name", x: LEFT - 7, y: y(top + height / 2) + 3.5, "text-anchor": "end" }, name));
  }
  const labels = [];
  const until = new Map(); // row -> where its last label ends: labels do not run into each other
  for (const [at, [kind, start, end, top, height, colour, text, op, stage]] of picture.boxes.entries()) {
    const width = (end - start) * across;
    if (width <= 0) continue;
    const place = { x: x(start).toFixed(2), y: y(top).toFixed(2), width: width.toFixed(2), height: (height * INCH).toFixed(2) };
    if (kind === "filling" || kind === "idle") out.push(svg("rect", { class: kind, ...place, fill: colour }));
    else {
      const of = op === null ? {} : { "data-op": op, "data-stage": stage ?? 0 };
      const edge = width > 8 ? {} : { style: `stroke-width:${width > 3 ? 0.3 : 0}` };
      out.push(svg("rect", { class: "box", ...place, fill: colour, "data-text": text, "data-start": start, "data-end": end, ...of, ...edge }));
      if (kind === "again") out.push(svg("rect", { ...place, fill: "url(#hatch)", "pointer-events": "none" }));
    }
    const size = text ? wide(text) : 0;
    const left = x((start + end) / 2) - size / 2;
    const [before, after] = [picture.boxes[at - 1], picture.boxes[at + 1]];
    const dense = stage === undefined && before?.[3] === top && after?.[3] === top && Math.max(start - before[2], after[1] - end) * across < 1.5;
    const fits = size + 3 <= width || (dense && height > 0.2 && text !== "0" && Number(text) % 10 === 0); // of many layers, every tenth
    const row = `${kind === "idle"} ${top}`;
    if (text && height * INCH >= 9 && fits && left > (until.get(row) ?? 0) + CLEAR) {
      until.set(row, left + size);
      const middle = { x: x((start + end) / 2).toFixed(1), y: (y(top + height / 2) + 3.7).toFixed(1), "text-anchor": "middle" };
      labels.push(svg("text", { class: kind === "idle" ? "idle-text" : "", ...middle }, text));
    }
  }
  let before = null;
  for (const [start, end, top, height] of picture.path) {
    out.push(svg("rect", { class: "path", x: x(start), y: y(top), width: (end - start) * across, height: height * INCH }));
    if (before) {
      const [, then, above, tall] = before;
      const [from, to] = above < top ? [above + tall, top] : [above, top + height];
      out.push(svg("line", { class: "path", x1: x(then), x2: x(start), y1: y(from), y2: y(to) }));
    }
    before = [start, end, top, height];
  }
  $("drawing").setAttribute("width", LEFT + across + 8);
  $("drawing").setAttribute("height", high);
  $("drawing").replaceChildren(...out, ...labels, svg("rect", { class: "chosen", visibility: "hidden" }), svg("g", { id: "names" }, ...names));
  $("title").textContent = picture.title;
  keepNames();
  showLegend(picture);
  outlineChosen();
}

const keepNames = () => $("names")?.setAttribute("transform", `translate(${$("scroll").scrollLeft})`);
$("scroll").addEventListener("scroll", keepNames);

function ticks(seconds, across) {
  const [scale, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  const least = (90 / across) * (seconds / scale);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((k) => k * power).find((each) => each >= least);
  const count = Math.floor(seconds / scale / step);
  return Array.from({ length: count + 1 }, (_, k) => ({ at: (k * step * scale) / seconds, text: `${Number((k * step).toPrecision(6))}${k === count ? ` ${unit}` : ""}` }));
}

function showLegend({ boxes, lanes }) {
  const kinds = new Set(boxes.map(([kind]) => kind));
  const stages = lanes[0]?.[0].startsWith("stage");
  const samples = stages
    ? [["#9ec0f5", "forward"], ["#92d3a5", "backward"], ["#b9a7d6", "gathers"], ["#d9b98a", "reductions"], ["#6b7280", "messages"]]
    : [["linear-gradient(90deg,#bac7ff,#b5e0c0)", "weights, first layer to last"], ["linear-gradient(90deg,#7d96ee,#74b985)", "gradients"]];
  if (kinds.has("again")) samples.push(["repeating-linear-gradient(45deg,#888 0 1px,#ccc 1px 4px)", "recomputes its forward first"]);
  if (kinds.has("idle")) samples.push(["#f3b8ac", "compute idle"]);
  if (kinds.has("inside")) samples.push(["#4b3f72", "collectives in a block"]);
  $("legend").replaceChildren(...samples.map(([colour, words]) => element("span", {}, element("i", { style: `background:${colour}` }), words)), element("span", {}, element("i", { style: "border:1.2px solid var(--ink)" }), "critical path"));
}

function outlineChosen() {
  const mark = $("drawing").querySelector(".chosen");
  const box = $("drawing").querySelector(`.box[data-op="${state.chosen}"][data-stage="${state.stage}"]`);
  if (!mark) return;
  mark.setAttribute("visibility", box && !drag.on && !state.result?.refused ? "visible" : "hidden");
  if (box) for (const name of ["x", "y", "width", "height"]) mark.setAttribute(name, box.getAttribute(name));
}

$("drawing").addEventListener("click", ({ target }) => {
  if (target.dataset.op !== undefined && Number(target.dataset.op) < state.stages[target.dataset.stage].length) choose(Number(target.dataset.stage), Number(target.dataset.op), true);
});
$("drawing").addEventListener("pointermove", ({ target, clientX, clientY }) => {
  const tip = $("tip");
  const { op, stage, text, start, end } = target.dataset;
  tip.hidden = start === undefined;
  if (tip.hidden) return;
  const row = op === undefined || state.result.refused || stage === undefined ? null : state.result.rows[stage][op];
  const call = row && state.stages.length > 1 && target.getAttribute("height") > 10 ? ` and on, microbatch ${text}` : "";
  const time = (part) => duration(part * state.picture.seconds);
  tip.textContent = `${row ? row[1] + call : text}\n${time(start)} to ${time(end)}: ${time(end - start)}`;
  tip.style.left = `${Math.min(clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
});
$("drawing").addEventListener("pointerleave", () => ($("tip").hidden = true));
$("scroll").addEventListener("wheel", (event) => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoom(event.deltaY < 0 ? 1.25 : 0.8);
}, { passive: false });
new ResizeObserver(() => state.picture && showPicture(state.picture)).observe($("result"));

const duration = (seconds) => {
  const [scale, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${(seconds / scale).toPrecision(4)} ${unit}`;
};

// ---- programs in files, and in the address

$("file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  target.value = "";
  if (!file) return;
  const begun = performance.now();
  try {
    const found = await ask("open", file.name, await file.text());
    const model = { file: file.name, title: file.name, gpus: found.gpus, program: found["has ops"], opened: true };
    if (!shared.models.has(file.name)) form.trace.append(new Option(`${file.name}: ${found.mesh}`, file.name));
    shared.models.set(file.name, model);
    form.trace.value = file.name;
    for (const name of ["gpus", "microbatches", "stages"]) if (name in found) form[name].value = found[name];
    lock(model);
    if (model.program) form.builder.value = "";
    showOptions();
    state.built = []; // edits of another program with the same ops are not this one's
    await build("");
  } catch (error) {
    refuseSettings(error.message, begun);
  }
});

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

async function through(stream, bytes) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}

async function packed() {
  const text = JSON.stringify({ settings: state.settings, ...(isEdited() ? { stages: state.stages } : {}) });
  const bytes = await through(new CompressionStream("deflate-raw"), text);
  return "#" + btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}

async function opened(hash) {
  if (hash.length < 2) return null;
  try {
    const bytes = Uint8Array.from(atob(hash.slice(1).replace(/-/g, "+").replace(/_/g, "/")), (sign) => sign.charCodeAt(0));
    const found = JSON.parse(new TextDecoder().decode(await through(new DecompressionStream("deflate-raw"), bytes)));
    return shared.models.has(found.settings.trace) ? found : null;
  } catch {
    return null; // an address that was cut short, or written by hand
  }
}

// ---- elements: names come from other people, so nothing here is ever parsed as HTML

const element = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") made.style.cssText = value; // the policy of the page refuses the attribute
    else if (typeof value === "boolean" && key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
