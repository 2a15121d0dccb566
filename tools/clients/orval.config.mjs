export default {
  site: {
    input: 'generated/openapi.json',
    output: {
      client: 'fetch',
      target: 'generated/orval.ts',
      baseUrl: { getBaseUrlFromSpecification: true },
    },
  },
};
