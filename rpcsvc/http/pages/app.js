// Shows an order in the window of an MCP host (SEP-1865): what the host tells of a tool's result,
// and then, where the host passes calls on, the order's status every few seconds until it is over.
"use strict";
(() => {
  const EVERY_MS = 5000;
  const OVER = ["completed", "terminal_failure"];
  const texts = JSON.parse(document.getElementById("texts").textContent);
  const element = (id) => document.getElementById(id);
  const root = document.documentElement;
  const answers = new Map();
  let host = {};
  let shown = null;
  let timer = 0;
  let last = 0;

  const post = (message) => window.parent.postMessage({ jsonrpc: "2.0", ...message }, "*");
  const ask = (method, params) =>
    new Promise((resolve, reject) => {
      last += 1;
      answers.set(last, { resolve, reject });
      post({ id: last, method, params });
    });

  const write = (id, text) => {
    element(id).textContent = text || "";
    element(id).hidden = !text;
  };

  // The words of the order's page: its status, or what is special about a payment that is awaited.
  const situation = ({ order, fundingInstructions }) => {
    if (fundingInstructions) return order.status === "deposit_detected" ? "partial" : order.status;
    if (order.status !== "awaiting_deposit") return order.status;
    return Date.parse(order.expiresAt) > Date.now() ? "signed_payment" : "window_over";
  };

  const show = (result) => {
    const envelope = result.structuredContent;
    if (!envelope) return;
    const error = envelope.ok ? null : envelope.error;
    write("error", error && error.message);
    if (error || !envelope.data.order) return;
    const { order, fundingInstructions: funding, actionRequired, transfers } = envelope.data;
    // Only the answer that made the order names its page.
    const page = order.checkoutUrl || (shown && shown.id === order.orderId && shown.page);
    shown = { id: order.orderId, isOver: OVER.includes(envelope.state), page };
    write("heading", texts.headings[actionRequired || situation(envelope.data)]);
    write("order", order.orderId);
    element("pay").hidden = !funding;
    if (funding) {
      element("amount").textContent = `${funding.amount} ${funding.asset}`;
      element("address").textContent = funding.depositAddress;
      element("network").textContent = funding.network;
      element("until").textContent = new Date(order.expiresAt).toLocaleString();
      element("note").hidden = funding.asset !== "USDC";
    }
    const image = (result._meta || {})[texts.qr] || "";
    element("qr").hidden = !funding || !image.startsWith("data:image/png;base64,");
    if (!element("qr").hidden) element("qr").src = image;
    write("sent", (transfers || []).map((each) => `${each.amount} ${each.asset}${each.address ? ` → ${each.address}` : ""}`).join("\n"));
    element("open").hidden = !(host.openLinks && shown.page);
    follow();
  };

  const follow = () => {
    clearTimeout(timer);
    if (!host.serverTools || !shown || shown.isOver) return;
    timer = setTimeout(async () => {
      try {
        if (!document.hidden) {
          show(await ask("tools/call", { name: texts.tool, arguments: { orderId: shown.id, detail: "full" } }));
        }
      } catch {
        write("error", texts.stale);
      }
      follow();
    }, EVERY_MS);
  };

  const dress = (context) => {
    if (context.theme) root.style.colorScheme = context.theme;
    const named = (context.styles && context.styles.variables) || {};
    for (const [name, value] of Object.entries(named)) {
      if (name.startsWith("--") && value) root.style.setProperty(name, value);
    }
  };

  const heard = {
    "ui/notifications/tool-result": show,
    "ui/notifications/tool-cancelled": () => write("error", texts.cancelled),
    "ui/notifications/host-context-changed": dress,
    "ui/resource-teardown": () => {
      shown = null;
      clearTimeout(timer);
    },
    ping: () => {},
  };

  window.addEventListener("message", (event) => {
    if (event.source !== window.parent || !event.data || event.data.jsonrpc !== "2.0") return;
    const { id, method, params, result, error } = event.data;
    if (method !== undefined) {
      if (heard[method]) heard[method](params || {});
      if (id === undefined) return;
      post(heard[method] ? { id, result: {} } : { id, error: { code: -32601, message: "Method not found" } });
      return;
    }
    const waiting = answers.get(id);
    answers.delete(id);
    if (!waiting) return;
    if (error) waiting.reject(new Error(error.message));
    else waiting.resolve(result);
  });

  element("open").addEventListener("click", () => ask("ui/open-link", { url: shown.page }));
  new ResizeObserver(() => {
    const { width, height } = document.body.getBoundingClientRect();
    post({ method: "ui/notifications/size-changed", params: { width: Math.ceil(width), height: Math.ceil(height) } });
  }).observe(document.body);

  ask("ui/initialize", {
    protocolVersion: "2026-01-26",
    appInfo: { name: texts.name, version: texts.version },
    appCapabilities: { availableDisplayModes: ["inline"] },
  }).then((reply) => {
    host = reply.hostCapabilities || {};
    dress(reply.hostContext || {});
    post({ method: "ui/notifications/initialized", params: {} });
    follow();
  });
})();
