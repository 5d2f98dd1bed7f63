(function () {
  "use strict";
  var root = document.documentElement;
  root.classList.add("js");
  var find = function (selector, within) { return (within || document).querySelector(selector); };
  var all = function (selector) { return Array.prototype.slice.call(document.querySelectorAll(selector)); };

  // Colours: the system's, until the reader chooses.
  var button = find("#theme");
  var prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  var isDark = function () { return (root.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark"; };
  var showState = function () { button.textContent = isDark() ? "Light colours" : "Dark colours"; };
  try {
    var kept = localStorage.getItem("leaktight-theme");
    if (kept === "dark" || kept === "light") { root.dataset.theme = kept; }
  } catch (blocked) { /* storage may be closed to local files */ }
  button.hidden = false;
  button.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("leaktight-theme", root.dataset.theme); } catch (blocked) { /* as above */ }
    showState();
  });
  prefersDark.addEventListener("change", showState);
  showState();

  // The viewer of enlarged pairs.
  var viewer = find("#viewer");
  var figures = all("figure.pair");
  var current = 0;
  function show(index) {
    current = (index + figures.length) % figures.length;
    var figure = figures[current];
    find("#viewer-title").textContent = figure.dataset.title;
    find("#viewer-place").textContent = figure.dataset.place;
    var pictures = find(".viewer-pictures", viewer);
    pictures.textContent = "";
    figure.querySelectorAll(".half").forEach(function (half) { pictures.appendChild(half.cloneNode(true)); });
    var scores = find("dl.scores", figure);
    find("dl.scores", viewer).replaceChildren.apply(
      find("dl.scores", viewer),
      scores ? Array.prototype.map.call(scores.children, function (row) { return row.cloneNode(true); }) : []
    );
  }
  if (viewer && viewer.showModal && figures.length) {
    figures.forEach(function (figure, index) {
      find(".pair-open", figure).addEventListener("click", function (event) {
        event.preventDefault();
        show(index);
        viewer.showModal();
      });
    });
    find("#viewer-close").addEventListener("click", function () { viewer.close(); });
    find("#viewer-back").addEventListener("click", function () { show(current - 1); });
    find("#viewer-next").addEventListener("click", function () { show(current + 1); });
    viewer.addEventListener("keydown", function (event) {
      if (event.key === "ArrowLeft") { show(current - 1); }
      if (event.key === "ArrowRight") { show(current + 1); }
    });
    viewer.addEventListener("click", function (event) { if (event.target === viewer) { viewer.close(); } });
    viewer.addEventListener("close", function () {
      var link = find(".pair-open", figures[current]);
      var held = figures[current].closest("details");
      if (held) { held.open = true; }
      link.focus();
    });
  }

  // Tooltips of points.
  var tip = find("#tip");
  function hint(point) {
    var box = point.getBoundingClientRect();
    tip.textContent = point.dataset.tip;
    tip.hidden = false;
    var left = box.left + box.width / 2 - tip.offsetWidth / 2;
    var above = box.top - tip.offsetHeight - 6;
    tip.style.left = Math.max(8, Math.min(left, root.clientWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (above > 8 ? above : box.bottom + 6) + "px";
  }
  function unhint() { tip.hidden = true; }
  if (tip) {
    all("[data-tip]").forEach(function (point) {
      var title = find("title", point);
      if (title) { title.remove(); } // else the browser shows a second tooltip
      point.addEventListener("pointerenter", function () { hint(point); });
      point.addEventListener("pointerleave", unhint);
      point.addEventListener("focus", function () { hint(point); });
      point.addEventListener("blur", unhint);
    });
    window.addEventListener("scroll", unhint, { passive: true });
    document.addEventListener("keydown", function (event) { if (event.key === "Escape") { unhint(); } });
  }

  // Copy buttons.
  all(".copy").forEach(function (copy) {
    var words = copy.innerHTML;
    copy.hidden = false;
    copy.addEventListener("click", function () {
      var code = find("code", copy.parentNode);
      var done = function () {
        copy.textContent = "Copied";
        setTimeout(function () { copy.innerHTML = words; }, 1500);
      };
      var select = function () { getSelection().selectAllChildren(code); };
      if (navigator.clipboard) { navigator.clipboard.writeText(code.textContent).then(done, select); } else { select(); }
    });
  });

  // Open closed parts for links into them and for printing.
  function reveal() {
    var target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    var held = target && target.closest("details");
    if (held && !held.open) { held.open = true; target.scrollIntoView(); }
  }
  window.addEventListener("hashchange", reveal);
  reveal();
  var closed = [];
  window.addEventListener("beforeprint", function () {
    closed = all("details:not([open])");
    closed.forEach(function (part) { part.open = true; });
  });
  window.addEventListener("afterprint", function () { closed.forEach(function (part) { part.open = false; }); });
})();
