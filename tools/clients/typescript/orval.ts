// orval with its fetch client; the document says where the service is.
import * as api from '../generated/orval';
import { type Client, makeOrders } from './scenario';

type Answer = { status: number; data: unknown };
type Good<T extends Answer> = Extract<T, { status: 200 }>['data'];

function good<T extends Answer>(answer: T): Good<T> {
  if (answer.status !== 200) throw new Error(JSON.stringify(answer.data));
  return answer.data as Good<T>;
}

const client: Client = {
  async quote(price) {
    return good(await api.swapQuote(price)).data.quoteDigest;
  },
  async execute(swap, key) {
    const options = { headers: { 'idempotency-key': key } };
    return good(await api.swapExecute(swap, options)).data.order.orderId;
  },
  async fund(orderId) {
    good(await api.sandboxFund({ orderId }));
  },
  async state(orderId) {
    return good(await api.swapStatus(orderId)).state;
  },
  async orderBff(order) {
    return good(await api.bffOrdersCreate(order)).orderId;
  },
  async bffStatus(orderId) {
    return good(await api.bffOrdersGet(orderId)).status;
  },
};

makeOrders('orval', client);
