// @hey-api/openapi-ts with its own fetch client; the document says where the service is.
import * as api from '../generated/hey-api';
import { type Client, good, makeOrders } from './scenario';

const client: Client = {
  async quote(body) {
    return good(await api.swapQuote({ body })).data.quoteDigest;
  },
  async execute(body, key) {
    const headers = { 'idempotency-key': key };
    return good(await api.swapExecute({ body, headers })).data.order.orderId;
  },
  async fund(orderId) {
    good(await api.sandboxFund({ body: { orderId } }));
  },
  async state(orderId) {
    return good(await api.swapStatus({ path: { orderId } })).state;
  },
  async orderBff(body) {
    return good(await api.bffOrdersCreate({ body })).orderId;
  },
  async bffStatus(orderId) {
    return good(await api.bffOrdersGet({ path: { orderId } })).status;
  },
};

makeOrders('hey-api', client);
