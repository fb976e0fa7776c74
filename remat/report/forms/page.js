"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.getElementById("report");
  const KINDS = ["saved", "recomputed", "other"];
  const ROW_HEIGHT = 26;

  // Everything that is shown goes through here: text becomes text nodes, never markup.
  function make(tag, options, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(options || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== ""));
    return element;
  }

  function bytes(n) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let k = 0;
    while (n >= 1024 && k < units.length - 1) { n /= 1024; k += 1; }
    return `${k ? n.toFixed(2) : n} ${units[k]}`;
  }

  function seconds(s) {
    if (!s) return "0";
    for (const [factor, unit] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]]) {
      if (s * factor >= 1) return `${(s * factor).toPrecision(3)} ${unit}`;
    }
    return `${(s * 1e9).toPrecision(3)} ns`;
  }

  const lastParts = (source) => source.split("/").slice(-2).join("/");
  const key = (kind) => make("span", { class: "key" }, make("span", { class: `dot ${kind}` }), kind);

  function figure(title, value, note) {
    return make("div", { class: "figure" }, title, make("b", {}, value), make("small", {}, note || ""));
  }

  function decisionsOf(graph) {
    return graph.decisions.map((d) => {
      const [name, op, args, value, , region, module, label, source] = graph.nodes[d[0]];
      const row = {
        name, op, args, value, region, module, label, source, state: d[1], reason: d[2], bytes: d[3], runs: d[4],
        save: d[5], recompute: d[6], policy: d[7], noSave: d[8], noRecompute: d[9], isView: d[10], general: d[11],
      };
      row.shown = label ? `${name} (${label})` : name;
      row.text = [name, label, op, row.state, row.reason, region, module, source, row.policy].join(" ").toLowerCase();
      return row;
    });
  }

  // ------------------------------------------------------------------------------------------------ summary

  function summary(graph, rows) {
    const count = (state) => rows.filter((row) => row.state === state).length;
    const peak = graph.peak;
    const where = `${peak.in_forward ? "forward" : "backward"} at ${peak.node}` + (peak.source ? `, ${lastParts(peak.source)}` : "");
    const box = make("div", { class: "figures" },
      figure("predicted peak", bytes(peak.num_bytes), where),
      figure("saved", bytes(graph.saved_bytes), `${count("saved")} values`),
      figure("recomputed", bytes(graph.recomputed_bytes), `${count("recomputed")} values, ${seconds(graph.recompute_seconds)} (estimated)`));
    if (count("offloaded")) {
      const sum = rows.filter((row) => row.state === "offloaded").reduce((total, row) => total + row.bytes, 0);
      box.append(figure("offloaded", bytes(sum), `${count("offloaded")} values`));
    }
    if (graph.budget_bytes !== null) box.append(figure("budget", bytes(graph.budget_bytes), graph.budget_note));
    if (graph.whole_bytes !== null) box.append(figure("peak if all were kept", bytes(graph.whole_bytes), ""));
    box.append(figure("joint graph", `${graph.num_nodes} nodes`, `for ${peak.executor}`));
    if (!graph.sizes.length) return box;
    const lines = graph.sizes.flatMap(([title, text]) => [make("dt", {}, title), make("dd", {}, text)]);
    return make("div", {}, box, make("dl", { class: "sizes" }, ...lines));
  }

  // ----------------------------------------------------------------------------------------------- timeline

  // Bytes per moment and kind. The simulator may let a result overwrite an input, so the sum of what is alive can
  // exceed the bytes counted; the excess is taken off what is neither saved nor recomputed first.
  function stacked(graph) {
    const moments = graph.live.length;
    const changes = KINDS.map(() => new Float64Array(moments + 1));
    for (const [, size, first, last, kind] of graph.memory) {
      changes[kind][first] += size;
      changes[kind][last + 1] -= size;
    }
    const sums = changes.map((change) => {
      let total = 0;
      return Array.from(change.subarray(0, moments), (delta) => (total += delta));
    });
    for (let moment = 0; moment < moments; moment += 1) {
      let excess = sums.reduce((total, kind) => total + kind[moment], 0) - graph.live[moment];
      for (const kind of [2, 1, 0]) {
        const taken = Math.max(0, Math.min(excess, sums[kind][moment]));
        sums[kind][moment] -= taken;
        excess -= taken;
      }
    }
    return sums;
  }

  function timeline(graph) {
    const sums = stacked(graph);
    const moments = graph.live.length;
    const canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": "memory alive at each moment of forward and backward" });
    const tip = make("div", { class: "tip", hidden: "" });
    const box = make("div", { class: "timeline" }, canvas, tip);
    const top = Math.max(1, ...(moments < 50000 ? graph.live : [graph.peak.num_bytes]));
    const pad = { left: 78, right: 14, top: 26, bottom: 24 };
    let hovered = -1;

    function draw() {
      const scale = window.devicePixelRatio || 1;
      const width = canvas.clientWidth || 800;
      const height = canvas.clientHeight || 300;
      canvas.width = width * scale;
      canvas.height = height * scale;
      const g = canvas.getContext("2d");
      g.scale(scale, scale);
      const css = getComputedStyle(document.documentElement);
      const colour = (name) => css.getPropertyValue(`--${name}`).trim();
      const x = (moment) => pad.left + ((width - pad.left - pad.right) * moment) / Math.max(moments, 1);
      const y = (size) => height - pad.bottom - ((height - pad.top - pad.bottom) * size) / top;
      g.font = "11px system-ui, sans-serif";
      axes(g, colour, x, y, width, height);
      areas(g, colour, x, y);
      marks(g, colour, x, y, height);
    }

    function axes(g, colour, x, y, width, height) {
      g.strokeStyle = colour("line");
      g.fillStyle = colour("quiet");
      g.textAlign = "right";
      for (let k = 0; k <= 4; k += 1) {
        const level = y((top * k) / 4);
        g.beginPath(); g.moveTo(pad.left, level); g.lineTo(width - pad.right, level); g.stroke();
        g.fillText(bytes(Math.round((top * k) / 4)), pad.left - 6, level + 4);
      }
      const border = x(graph.forward.length);
      g.beginPath(); g.moveTo(border, pad.top); g.lineTo(border, height - pad.bottom); g.stroke();
      g.textAlign = "center";
      g.fillText("forward", (pad.left + border) / 2, height - 8);
      g.fillText("backward", (border + width - pad.right) / 2, height - 8);
    }

    function areas(g, colour, x, y) {
      const below = new Float64Array(moments);
      KINDS.forEach((kind, k) => {
        g.beginPath();
        g.moveTo(x(0), y(below[0] || 0));
        for (let m = 0; m < moments; m += 1) {
          const level = y(below[m] + sums[k][m]);
          g.lineTo(x(m), level); g.lineTo(x(m + 1), level);
        }
        for (let m = moments - 1; m >= 0; m -= 1) {
          g.lineTo(x(m + 1), y(below[m])); g.lineTo(x(m), y(below[m]));
          below[m] += sums[k][m];
        }
        g.fillStyle = colour(kind);
        g.globalAlpha = 0.8;
        g.fill();
        g.globalAlpha = 1;
      });
    }

    function marks(g, colour, x, y, height) {
      if (!moments) return;
      const at = x(graph.peak.moment + 0.5);
      g.strokeStyle = g.fillStyle = colour("peak");
      g.setLineDash([4, 3]);
      g.beginPath(); g.moveTo(at, pad.top - 6); g.lineTo(at, height - pad.bottom); g.stroke();
      g.setLineDash([]);
      g.textAlign = at > (canvas.clientWidth || 800) / 2 ? "right" : "left";
      g.fillText(`peak ${bytes(graph.peak.num_bytes)} at ${graph.peak.node}`, at, pad.top - 10);
      if (hovered >= 0) {
        g.strokeStyle = colour("ink");
        g.beginPath(); g.moveTo(x(hovered + 0.5), pad.top); g.lineTo(x(hovered + 0.5), height - pad.bottom); g.stroke();
      }
    }

    function show(moment) {
      hovered = Math.max(0, Math.min(moments - 1, moment));
      const order = hovered < graph.forward.length ? graph.forward[hovered] : graph.backward[hovered - graph.forward.length];
      const alive = graph.memory.filter((m) => m[2] <= hovered && hovered <= m[3]).sort((a, b) => b[1] - a[1]);
      const table = make("table", {});
      for (const m of alive.slice(0, 10)) {
        const node = graph.nodes[m[0]];
        const name = node[7] ? `${node[0]} (${node[7]})` : node[0];
        table.append(make("tr", {}, make("td", {}, key(KINDS[m[4]])), make("td", {}, name), make("td", { class: "number" }, bytes(m[1]))));
      }
      const half = hovered < graph.forward.length ? "forward" : "backward";
      tip.replaceChildren(
        make("b", {}, `${half}, ${graph.nodes[order][0]}`), ` · ${bytes(graph.live[hovered])} alive`, table,
        alive.length > 10 ? make("span", { class: "quiet" }, `and ${alive.length - 10} more`) : "");
      tip.hidden = false;
      const at = pad.left + ((canvas.clientWidth - pad.left - pad.right) * hovered) / Math.max(moments, 1);
      const isLeft = at < canvas.clientWidth / 2;
      tip.style.left = isLeft ? `${at + 14}px` : "auto";
      tip.style.right = isLeft ? "auto" : `${canvas.clientWidth - at + 14}px`;
      tip.style.top = "34px";
      draw();
    }

    function hide() { hovered = -1; tip.hidden = true; draw(); }

    canvas.addEventListener("mousemove", (event) => {
      const inside = event.clientX - canvas.getBoundingClientRect().left - pad.left;
      if (moments) show(Math.floor((inside / (canvas.clientWidth - pad.left - pad.right)) * moments));
    });
    canvas.addEventListener("mouseleave", hide);
    canvas.addEventListener("blur", hide);
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !moments) return;
      event.preventDefault();
      show((hovered < 0 ? graph.peak.moment : hovered) + step);
    });
    window.addEventListener("resize", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    requestAnimationFrame(draw);
    return make("div", {}, make("div", {}, ...KINDS.map(key)), box);
  }

  // -------------------------------------------------------------------------------------------------- table

  const COLUMNS = [
    ["value", (row) => row.shown, ""],
    ["decision", (row) => (row.runs ? `${row.state} ×${row.runs}` : row.state), "state"],
    ["size", (row) => (row.isView && row.state === "recomputed" ? 0 : row.bytes), "bytes"],
    ["keep", (row) => row.save, "seconds"],
    ["run again", (row) => row.recompute, "seconds"],
    ["why", (row) => row.reason, ""],
    ["region", (row) => row.region, ""],
    ["module", (row) => row.module, ""],
    ["source", (row) => lastParts(row.source), ""],
  ];

  function cell(column, row) {
    const [, get, kind] = column;
    if (kind === "state") return make("span", { role: "cell" }, make("span", { class: `dot ${row.state}` }), ` ${get(row)}`);
    const text = kind === "bytes" ? (row.isView ? "view" : bytes(get(row))) : kind === "seconds" ? seconds(get(row)) : get(row);
    return make("span", { role: "cell", class: kind ? "number" : undefined, title: kind ? undefined : text }, text);
  }

  function table(rows) {
    let shown = rows;
    let sorted = { column: 2, down: true };
    const search = make("input", { type: "search", placeholder: "filter: name, op, reason, region, module, file …", "aria-label": "filter decisions" });
    const choice = make("select", { "aria-label": "decision" }, ...["all decisions", "saved", "recomputed", "offloaded"].map((text) => make("option", {}, text)));
    const count = make("span", { class: "quiet", role: "status" });
    const body = make("div", { class: "body", role: "rowgroup" });
    const head = make("div", { class: "row head", role: "row" }, ...COLUMNS.map(([title], k) =>
      make("span", { role: "columnheader" }, make("button", { type: "button", onclick: () => sortBy(k) }, title))));
    const view = make("div", { class: "table", role: "table", tabindex: "0", "aria-label": "decisions" }, head, body);
    const chosen = make("div", { class: "chosen-box", hidden: "" });

    function sortBy(column) {
      sorted = { column, down: sorted.column === column ? !sorted.down : ["bytes", "seconds"].includes(COLUMNS[column][2]) };
      update();
    }

    function update() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const state = choice.selectedIndex ? choice.value : "";
      shown = rows.filter((row) => (!state || row.state === state) && words.every((word) => row.text.includes(word)));
      const get = COLUMNS[sorted.column][1];
      const way = sorted.down ? -1 : 1;
      shown = shown.map((row, k) => [get(row), k, row])
        .sort((a, b) => (a[0] < b[0] ? -way : a[0] > b[0] ? way : a[1] - b[1])).map((item) => item[2]);
      head.querySelectorAll("[role=columnheader]").forEach((cellOfHead, k) => {
        const way = k !== sorted.column ? "none" : sorted.down ? "descending" : "ascending";
        cellOfHead.setAttribute("aria-sort", way);
        cellOfHead.firstChild.textContent = COLUMNS[k][0] + { none: "", descending: " ▾", ascending: " ▴" }[way];
      });
      count.textContent = `${shown.length} of ${rows.length}`;
      body.style.height = `${shown.length * ROW_HEIGHT}px`;
      view.scrollTop = 0;
      render();
    }

    // Only the rows in sight exist.
    function render() {
      const first = Math.max(0, Math.floor(view.scrollTop / ROW_HEIGHT) - 5);
      const last = Math.min(shown.length, first + Math.ceil((view.clientHeight || 460) / ROW_HEIGHT) + 10);
      const lines = [];
      for (let k = first; k < last; k += 1) {
        const row = shown[k];
        const line = make("div", { class: "row", role: "row", onclick: () => choose(row) }, ...COLUMNS.map((column) => cell(column, row)));
        line.style.top = `${k * ROW_HEIGHT}px`;
        lines.push(line);
      }
      body.replaceChildren(...lines);
    }

    function choose(row) {
      const facts = [
        `${row.state}${row.runs ? ` ×${row.runs}` : ""}: ${row.reason}`,
        `keeping it costs ${seconds(row.save)} and ${bytes(row.bytes)}; running it again costs ${seconds(row.recompute)}`,
        row.general && `at other sizes: ${row.general}`,
        row.noSave && `may not be saved: ${row.noSave}`,
        row.noRecompute && `may not be recomputed: ${row.noRecompute}`,
        row.policy && `the region's policy answered ${row.policy}`,
        row.region && `region ${row.region}`, row.module && `module ${row.module}`, row.source,
      ].filter(Boolean);
      chosen.replaceChildren(
        make("div", { class: "code" }, `${row.name} = ${row.op}(${row.args})  ${row.value}`),
        ...facts.map((fact) => make("div", {}, fact)));
      chosen.hidden = false;
    }

    search.addEventListener("input", update);
    choice.addEventListener("change", update);
    view.addEventListener("scroll", render);
    window.addEventListener("resize", render);
    requestAnimationFrame(update);
    return make("div", {}, make("div", { class: "controls" }, search, choice, count), view, chosen);
  }

  // --------------------------------------------------------------------------------------------------- tree

  // Forward by region and module: a node of the tree is filled when it is opened.
  function tree(graph, rows) {
    const states = new Map(rows.map((row) => [row.name, row]));
    const top = { children: new Map(), leaves: [], saved: 0, recomputed: 0, count: 0 };
    for (const k of graph.forward) {
      const node = graph.nodes[k];
      const row = states.get(node[0]);
      const path = [...(node[6] ? node[6].split(".") : []), ...(node[5] ? node[5].split("/").map((part) => `region ${part}`) : [])];
      let at = top;
      for (const part of ["", ...path]) {
        if (part) {
          if (!at.children.has(part)) at.children.set(part, { children: new Map(), leaves: [], saved: 0, recomputed: 0, count: 0 });
          at = at.children.get(part);
        }
        at.count += 1;
        if (row && row.state !== "recomputed") at.saved += row.bytes;
        else if (row && !row.isView) at.recomputed += row.bytes;
      }
      at.leaves.push([node, row]);
    }
    const box = make("div", {});
    fill(box, top);
    return box;
  }

  function fill(box, at) {
    for (const [name, child] of at.children) {
      const totals = [`${child.count} ops`, child.saved && `${bytes(child.saved)} kept`, child.recomputed && `${bytes(child.recomputed)} recomputed`];
      const inner = make("details", {}, make("summary", {}, name, " ", make("span", { class: "quiet" }, totals.filter(Boolean).join(" · "))));
      inner.addEventListener("toggle", () => { if (inner.open && inner.childElementCount === 1) fill(inner, child); });
      box.append(inner);
    }
    for (const [node, row] of at.leaves) {
      const mark = make("span", { class: `dot ${row ? row.state : "other"}`, title: row ? row.state : "lives in forward only" });
      const note = row ? ` ${row.state}: ${row.reason}, ${bytes(row.bytes)}` : "";
      box.append(make("div", { class: "leaf code" }, mark, ` ${node[0]} = ${node[1]}(${node[2]})  ${node[3]}`, make("span", { class: "quiet" }, note)));
    }
  }

  // --------------------------------------------------------------------------------------------------- page

  root.replaceChildren(make("h1", {}, data.function || "remat"),
    make("div", { class: "quiet" }, Object.entries(data.versions).map((pair) => pair.join(" ")).join(", ")));
  if (data.breaks.length) {
    root.append(make("h2", {}, "Graph breaks"), make("div", { class: "breaks" }, ...data.breaks.map((text) => make("div", {}, text))));
  }
  data.graphs.forEach((graph, number) => {
    const rows = decisionsOf(graph);
    const several = data.graphs.length > 1;
    root.append(make("section", { id: `graph-${number}` },
      several ? make("h2", {}, `Graph ${number}`) : "", summary(graph, rows),
      make("h2", {}, "Memory"), timeline(graph),
      make("h2", {}, "Decisions"), table(rows),
      make("h2", {}, "Forward, by module and region"), tree(graph, rows)));
  });
})();
