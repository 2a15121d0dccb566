// openapi-generator's typescript-fetch; the document says where the service is.
import { BffApi, SandboxApi, SwapApi } from '../generated/typescript-fetch';
import { type Client, makeOrders } from './scenario';

const swaps = new SwapApi();
const bff = new BffApi();
const sandbox = new SandboxApi();

const client: Client = {
  async quote(swapRequestBase) {
    return (await swaps.swapQuote({ swapRequestBase })).data.quoteDigest;
  },
  async execute(swapRequest, idempotencyKey) {
    return (await swaps.swapExecute({ swapRequest, idempotencyKey })).data.order.orderId;
  },
  async fund(orderId) {
    await sandbox.sandboxFund({ fundRequest: { orderId } });
  },
  async state(orderId) {
    return (await swaps.swapStatus({ orderId })).state;
  },
  async orderBff(bffOrderRequest) {
    return (await bff.bffOrdersCreate({ bffOrderRequest })).orderId;
  },
  async bffStatus(orderId) {
    return (await bff.bffOrdersGet({ orderId })).status;
  },
};

makeOrders('typescript-fetch', client);
