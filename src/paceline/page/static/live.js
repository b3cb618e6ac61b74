// Fills the live page from the server's messages. A reload, or a server that comes back, begins with a full message.
"use strict";
(() => {
  const link = document.getElementById("link");
  const query = location.search;
  let skew = 0, last = null, ended = false, linked = false, revision = -1;

  function fill(id, html) {
    const place = document.getElementById("live-" + id);
    if (place && place.dataset.html !== html) { place.innerHTML = html; place.dataset.html = html; }
  }

  function show(picture) {
    let figure = document.getElementById(picture.name);
    if (!figure) {
      document.getElementById("pictures").insertAdjacentHTML("beforeend", picture.frame);
      figure = document.getElementById(picture.name);
    }
    figure.querySelector("figcaption p").textContent = picture.caption;
    const plot = figure.querySelector(".plot");
    plot.style.height = picture.layout.height + "px";
    plot.setAttribute("aria-label", picture.title + ". " + picture.caption);
    // A picture out of sight is drawn when it comes into sight, with the newest data.
    plot.waiting = picture;
    seen.observe(plot);
    if (plot.visible) { plot.waiting = null; paceline.draw(picture); }
  }

  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      target.visible = isIntersecting;
      if (isIntersecting && target.waiting) { paceline.draw(target.waiting); target.waiting = null; }
    }
  }, { rootMargin: "200px" });
  addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach((plot) => {
    if (plot.waiting) { paceline.draw(plot.waiting); plot.waiting = null; }
  }));

  function status() {
    const silence = last === null || ended ? 0 : Date.now() / 1000 - skew - last;
    const words = !linked ? (ended ? "ended; no longer served" : "connection lost; trying again") : ended ? "ended" : silence > 10 ? `no step for ${Math.round(silence)} s` : "live";
    const kind = ended ? "done" : !linked || silence > 10 ? "failed" : "live";
    if (link.textContent !== words) { link.textContent = words; link.className = "state " + kind; }
  }

  const source = new EventSource("events" + query);
  source.onopen = () => { linked = true; status(); };
  source.onerror = () => { linked = false; if (ended) source.close(); status(); };
  source.onmessage = (event) => {
    const message = JSON.parse(event.data);
    linked = true;
    if (message.revision < revision) document.getElementById("pictures").innerHTML = "";  // another server, another run
    revision = message.revision;
    skew = Date.now() / 1000 - message.now;
    last = message.last; ended = message.ended;
    for (const [id, html] of Object.entries(message.parts)) fill(id, html);
    const title = document.querySelector("#live-heading h1");
    if (title) document.title = title.textContent + " · Paceline";
    message.pictures.forEach(show);
    document.documentElement.dataset.revision = message.revision;
    status();
  };
  setInterval(status, 1000);
})();
