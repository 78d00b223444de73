// kafkajs behind the command line of ../programs.py:
//   node client.js kafkajs consume BOOTSTRAP TOPIC PARTITION OFFSET END FETCH_BYTES
//   node client.js kafkajs produce BOOTSTRAP TOPIC PARTITION
//   node client.js kafkajs group BOOTSTRAP TOPIC GROUP COUNT
//   node client.js kafkajs time BOOTSTRAP TOPIC PARTITION TIMESTAMP
const readline = require('node:readline')
const { Kafka, logLevel } = require('kafkajs')

const [, command, bootstrap, topic, partition, offset, end, fetchBytes] = process.argv.slice(2)
const kafka = new Kafka({ clientId: 'tests', brokers: bootstrap.split(','), logLevel: logLevel.ERROR })
const text = (data) => (data === null || data === undefined ? null : data.toString())
const tell = (line) => process.stdout.write(JSON.stringify(line) + '\n')

async function consume() {
  const consumer = kafka.consumer({
    // It reads as a group alone; what it wants of the group is an assignment.
    groupId: `tests-${process.pid}-${Date.now()}`,
    maxBytesPerPartition: Number(fetchBytes),
    maxWaitTimeInMs: 200,
  })
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  await consumer.run({
    autoCommit: false,
    eachMessage: async ({ partition: from, message }) => {
      if (from !== Number(partition) || Number(message.offset) < Number(offset)) return
      tell({ offset: Number(message.offset), key: text(message.key), value: text(message.value) })
      if (Number(message.offset) >= Number(end) - 1) process.stdout.write('', () => process.exit(0))
    },
  })
  consumer.seek({ topic, partition: Number(partition), offset })
}

async function group() {
  const [id, count] = [partition, Number(offset)]
  const consumer = kafka.consumer({ groupId: id, maxWaitTimeInMs: 200 })
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  const read = new Map()
  let left = count
  await new Promise((resolve, reject) => {
    consumer.on(consumer.events.CRASH, ({ payload }) => reject(payload.error))
    const eachMessage = async ({ partition: from, message }) => {
      if (left-- <= 0) return
      const { offset: at, key, value } = message
      tell({ partition: from, offset: Number(at), key: text(key), value: text(value) })
      read.set(from, String(Number(at) + 1))
      if (left === 0) resolve()
    }
    consumer.run({ autoCommit: false, eachMessage }).catch(reject)
  })
  const done = [...read].map(([from, next]) => ({ topic, partition: from, offset: next }))
  await consumer.commitOffsets(done)
  await consumer.disconnect()
}

async function time() {
  const admin = kafka.admin()
  await admin.connect()
  const rows = await admin.fetchTopicOffsetsByTimestamp(topic, Number(offset))
  tell({ offset: Number(rows.find((row) => row.partition === Number(partition)).offset) })
  await admin.disconnect()
}

async function produce() {
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 })
  await producer.connect()
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { key = null, value } = JSON.parse(line)
    try {
      const messages = [{ key, value, partition: Number(partition) }]
      const [done] = await producer.send({ topic, acks: -1, messages })
      tell({ offset: Number(done.baseOffset) })
    } catch (error) {
      tell({ error: String(error) })
    }
  }
  await producer.disconnect()
}

;({ consume, produce, group, time })[command]().catch((error) => {
  console.error(error)
  process.exit(1)
})
