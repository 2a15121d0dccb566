// The orders that each TypeScript client makes: a swap each way and an order of the BFF.
import { randomUUID } from 'node:crypto';

const EVM = '0x52908400098527886E0F7030069857D2E4169EE7';
const MONERO =
  '888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc9dhwMVgN5S9cQUiyoogDavup3H';
const USDC_ON_ARBITRUM = '0xaf88d065e77c8cC2239327C5EDb3A432268e5831';
const LONGEST_MS = 60_000;

export type Price = { direction: 'x2u' | 'u2x'; chain: 'arbitrum'; amount: string };
export type Swap = Price & { to: string; sessionId: string; quoteDigest: string };
export type BffOrder = {
  fromChainId: number;
  toChainId: number;
  fromToken: string;
  toToken: string;
  fromAmount: string;
  toAddress: string;
  sessionId: string;
};

// What a generated client has to do. Orders are named by their id.
export interface Client {
  quote(price: Price): Promise<string>;
  execute(swap: Swap, idempotencyKey: string): Promise<string>;
  fund(orderId: string): Promise<void>;
  state(orderId: string): Promise<string>;
  orderBff(order: BffOrder): Promise<string>;
  bffStatus(orderId: string): Promise<string>;
}

export async function makeOrders(name: string, client: Client): Promise<void> {
  await Promise.all([
    swap(client, { direction: 'x2u', chain: 'arbitrum', amount: '0.8' }, EVM),
    swap(client, { direction: 'u2x', chain: 'arbitrum', amount: '150' }, MONERO),
    order(client),
  ]);
  console.log(`ok ${name}`);
}

async function swap(client: Client, price: Price, to: string): Promise<void> {
  const quoteDigest = await client.quote(price);
  const terms = { ...price, to, sessionId: randomUUID(), quoteDigest };
  const orderId = await client.execute(terms, randomUUID());
  await client.fund(orderId);
  await completed(() => client.state(orderId));
}

async function order(client: Client): Promise<void> {
  const orderId = await client.orderBff({
    fromChainId: 0,
    toChainId: 42161,
    fromToken: 'XMR',
    toToken: USDC_ON_ARBITRUM,
    fromAmount: '800000000000',
    toAddress: EVM,
    sessionId: randomUUID(),
  });
  await client.fund(orderId);
  await completed(() => client.bffStatus(orderId));
}

async function completed(look: () => Promise<string>): Promise<void> {
  const end = Date.now() + LONGEST_MS;
  let state = await look();
  while (state !== 'completed') {
    if (Date.now() > end) throw new Error(`still ${state} after ${LONGEST_MS} ms`);
    await new Promise((resolve) => setTimeout(resolve, 200));
    state = await look();
  }
}

// A client's answer without its error, which is thrown.
export function good<T>(answer: { data?: T; error?: unknown }): T {
  if (answer.data === undefined) throw new Error(JSON.stringify(answer.error));
  return answer.data;
}
