// Browsers start no worker for a page that was opened from a folder. The search then runs in a
// hidden frame of the page, which gets messages and answers as a worker does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const start = () => {
        document.body.append(this.frame);
        const scope = this.frame.contentWindow;
        scope.postMessage = answer;
        scope.importScripts = () => Promise.resolve();
        const code = scope.document.createElement("script");
        code.src = String(url);
        code.onload = () => {
          this.scope = scope;
          this.waiting.splice(0).forEach((data) => this.postMessage(data));
        };
        scope.document.head.append(code);
      };
      if (document.body) start();
      else document.addEventListener("DOMContentLoaded", start);
    }
    postMessage(data) {
      if (this.scope) this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
