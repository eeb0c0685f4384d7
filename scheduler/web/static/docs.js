// The page at /docs: what this scheduler's API is, to be tried out on this scheduler.

SwaggerUIBundle({
  url: `${document.documentElement.dataset.root ?? ""}/openapi.json`,
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null, // it would send the description to another origin
  layout: "BaseLayout",
});
