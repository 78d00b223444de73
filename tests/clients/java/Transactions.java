// Transactions of Kafka's own client for ../transactional.py: a JSON line in, one out.
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

class Transactions {
    static final ObjectMapper JSON = new ObjectMapper();
    static final Map<String, KafkaProducer<String, String>> producers = new HashMap<>();

    public static void main(String[] words) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Map<String, Object> answer = new HashMap<>();
            try {
                answer.put("values", obey(JSON.readTree(line)));
            } catch (ExecutionException error) {
                answer.put("error", String.valueOf(error.getCause()));
            } catch (KafkaException error) {
                answer.put("error", error + " because of " + error.getCause());
            }
            System.out.println(JSON.writeValueAsString(answer));
        }
        System.exit(0);
    }

    static List<String> obey(JsonNode asked) throws Exception {
        String name = asked.path("producer").asText();
        KafkaProducer<String, String> producer = producers.get(name);
        switch (asked.get("do").asText()) {
            case "open" -> producers.put(name, open(asked));
            case "begin" -> producer.beginTransaction();
            case "send" -> send(producer, asked.get("topic").asText(), texts(asked.get("values")));
            case "offsets" -> producer.sendOffsetsToTransaction(
                Map.of(
                    new TopicPartition(asked.get("topic").asText(), 0),
                    new OffsetAndMetadata(asked.get("offset").asLong())
                ),
                new ConsumerGroupMetadata(asked.get("group").asText())
            );
            case "commit" -> producer.commitTransaction();
            case "abort" -> producer.abortTransaction();
            case "read" -> {
                return read(asked);
            }
            case "copy" -> copy(asked);
            default -> throw new IllegalArgumentException(asked.toString());
        }
        return List.of();
    }

    static List<String> texts(JsonNode values) {
        List<String> found = new ArrayList<>();
        values.forEach(value -> found.add(value.asText()));
        return found;
    }

    static KafkaProducer<String, String> open(JsonNode asked) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", asked.get("bootstrap").asText());
        settings.put("transactional.id", asked.get("id").asText());
        settings.put("transaction.timeout.ms", asked.path("timeout_ms").asInt(60_000));
        settings.put("request.timeout.ms", asked.path("request_ms").asInt(30_000));
        settings.put("batch.size", 1); // a batch for each record, five of them under way
        settings.put("linger.ms", 0);
        StringSerializer text = new StringSerializer();
        KafkaProducer<String, String> made = new KafkaProducer<>(settings, text, text);
        made.initTransactions();
        return made;
    }

    static void send(KafkaProducer<String, String> producer, String topic, List<String> values)
        throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (String value : values) sent.add(producer.send(new ProducerRecord<>(topic, 0, null, value)));
        for (Future<RecordMetadata> future : sent) future.get();
    }

    static KafkaConsumer<String, String> consumer(JsonNode asked, String isolation, String group) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", asked.get("bootstrap").asText());
        settings.put("isolation.level", isolation);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", false);
        settings.put("max.poll.records", 2);
        if (group != null) settings.put("group.id", group);
        StringDeserializer text = new StringDeserializer();
        return new KafkaConsumer<>(settings, text, text);
    }

    static List<String> read(JsonNode asked) {
        String until = asked.get("until").isNull() ? null : asked.get("until").asText();
        List<String> found = new ArrayList<>();
        TopicPartition at = new TopicPartition(asked.get("topic").asText(), 0);
        try (KafkaConsumer<String, String> reader = consumer(asked, asked.get("isolation").asText(), null)) {
            reader.assign(List.of(at));
            reader.position(at);
            long last = System.nanoTime();
            while (until == null || !found.contains(until)) {
                for (ConsumerRecord<String, String> record : reader.poll(Duration.ofMillis(200))) {
                    found.add(record.value());
                    last = System.nanoTime();
                }
                long quiet = (System.nanoTime() - last) / 1_000_000;
                if (until == null && quiet > asked.get("quiet_ms").asLong()) break;
                if (quiet > 60_000) throw new KafkaException("no " + until + " in " + found);
            }
        }
        return found;
    }

    static void copy(JsonNode asked) throws Exception {
        String source = asked.get("source").asText(), target = asked.get("target").asText();
        TopicPartition at = new TopicPartition(source, 0);
        try (
            KafkaProducer<String, String> producer = open(asked);
            KafkaConsumer<String, String> member =
                consumer(asked, "read_committed", asked.get("group").asText())
        ) {
            member.subscribe(List.of(source));
            int turn = 0;
            for (int done = 0; done < asked.get("count").asInt(); ) {
                List<ConsumerRecord<String, String>> records =
                    member.poll(Duration.ofMillis(500)).records(at);
                if (records.isEmpty()) continue;
                producer.beginTransaction();
                List<String> values = new ArrayList<>();
                for (ConsumerRecord<String, String> record : records) values.add("<" + record.value() + ">");
                send(producer, target, values);
                long end = records.get(records.size() - 1).offset() + 1;
                producer.sendOffsetsToTransaction(
                    Map.of(at, new OffsetAndMetadata(end)), member.groupMetadata()
                );
                if (++turn % 2 == 1) {
                    producer.abortTransaction();
                    member.seek(at, records.get(0).offset());
                } else {
                    producer.commitTransaction();
                    done += records.size();
                }
            }
        }
    }
}
