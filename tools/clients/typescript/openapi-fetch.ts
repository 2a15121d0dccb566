// openapi-fetch, with the types of openapi-typescript.
import createClient from 'openapi-fetch';
import type { components, paths } from '../generated/openapi-typescript';
import { type Client, good, makeOrders } from './scenario';

const api = createClient<paths>({ baseUrl: process.env.SITE });

const client: Client = {
  async quote(body) {
    const { data } = good(await api.POST('/api/v1/agent/swap/quote', { body }));
    return data.quoteDigest;
  },
  async execute(body, key) {
    const params = { header: { 'idempotency-key': key } };
    const { data } = good(await api.POST('/api/v1/agent/swap/execute', { body, params }));
    return data.order.orderId;
  },
  async fund(orderId) {
    good(await api.POST('/api/v1/sandbox/fund', { body: { orderId } }));
  },
  async state(orderId) {
    const params = { path: { orderId } };
    return good(await api.GET('/api/v1/agent/swap/status/{orderId}', { params })).state;
  },
  async orderBff(body) {
    return good(await api.POST('/bff/v1/orders', { body })).orderId;
  },
  async bffStatus(orderId) {
    const params = { path: { orderId } };
    return good(await api.GET('/bff/v1/orders/{orderId}', { params })).status;
  },
};

// @ts-expect-error: the types have to refuse a swap without any terms.
const nothing: components['schemas']['SwapRequest'] = {};

makeOrders('openapi-fetch', client);
