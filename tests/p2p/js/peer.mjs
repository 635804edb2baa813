// A js-libp2p node on one gossip topic, for tests/p2p/test_host_js.py. It tells what happens as a JSON object a line.
//
//   node peer.mjs --topic T [--dial MULTIADDR] [--pub COUNT --size BYTES --interval MS] [--secs S]

import { createHash } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'

// js-libp2p calls this, and Node.js 20 does not have it yet.
if (Promise.withResolvers === undefined) {
  Promise.withResolvers = function () {
    const made = {}
    made.promise = new this((resolve, reject) => Object.assign(made, { resolve, reject }))
    return made
  }
}

const { noise } = await import('@chainsafe/libp2p-noise')
const { yamux } = await import('@chainsafe/libp2p-yamux')
const { gossipsub } = await import('@libp2p/gossipsub')
const { identify } = await import('@libp2p/identify')
const { tcp } = await import('@libp2p/tcp')
const { multiaddr } = await import('@multiformats/multiaddr')
const { createLibp2p } = await import('libp2p')

const text = (value) => ({ type: 'string', default: value })
const { values: wanted } = parseArgs({
  options: {
    topic: text('t'),
    dial: { type: 'string' },
    pub: text('0'),
    size: text('16'),
    interval: text('500'),
    secs: text('15')
  }
})

function tell (event, details) {
  console.log(JSON.stringify({ ev: event, ...details }))
}

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: { identify: identify(), gossip: gossipsub({ allowPublishToZeroTopicPeers: true }) }
})
const { gossip } = node.services

node.addEventListener('peer:disconnect', ({ detail }) => tell('disconnect', { peer: detail.toString() }))
gossip.addEventListener('message', ({ detail }) => {
  const { data } = detail
  tell('recv', {
    from: detail.from?.toString(),
    len: data.length,
    sha: createHash('sha256').update(data).digest('hex').slice(0, 12),
    text: data.length <= 64 ? Buffer.from(data).toString() : undefined
  })
})
gossip.subscribe(wanted.topic)
tell('addr', { addrs: node.getMultiaddrs().map(String) })
if (wanted.dial !== undefined) await node.dial(multiaddr(wanted.dial))

const end = Date.now() + 1000 * Number(wanted.secs)
let left = Number(wanted.pub)
while (Date.now() < end) {
  await sleep(Number(wanted.interval))
  if (left > 0 && gossip.getSubscribers(wanted.topic).length > 0) {
    // Each message another, so that none is taken for one that was there.
    await gossip.publish(wanted.topic, Buffer.alloc(Number(wanted.size), `message ${left} `))
    left -= 1
  }
}
await node.stop()
process.exit(0)
