// Kafka's own client behind the command line of ../programs.py:
//   java -cp LIBS Client.java java consume BOOTSTRAP TOPIC PARTITION OFFSET END FETCH_BYTES
//   java -cp LIBS Client.java java produce BOOTSTRAP TOPIC PARTITION
//   java -cp LIBS Client.java java group BOOTSTRAP TOPIC GROUP COUNT
//   java -cp LIBS Client.java java time BOOTSTRAP TOPIC PARTITION TIMESTAMP
//   java -cp LIBS Client.java java load BOOTSTRAP TOPIC METADATA_MS TIMEOUT_MS
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

class Client {
    static final ObjectMapper JSON = new ObjectMapper();

    public static void main(String[] words) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[2]);
        if (words[1].equals("group")) {
            group(settings, words[3], words[4], Integer.parseInt(words[5]));
            return;
        }
        if (words[1].equals("load")) {
            settings.put("metadata.max.age.ms", words[4]);
            settings.put("delivery.timeout.ms", words[5]);
            settings.put("request.timeout.ms", String.valueOf(Integer.parseInt(words[5]) / 2));
            load(settings, words[3]);
            return;
        }
        TopicPartition at = new TopicPartition(words[3], Integer.parseInt(words[4]));
        if (words[1].equals("consume")) {
            settings.put("max.partition.fetch.bytes", words[7]);
            settings.put("fetch.max.bytes", words[7]);
            settings.put("fetch.max.wait.ms", "200");
            consume(settings, at, Long.parseLong(words[5]), Long.parseLong(words[6]));
        } else if (words[1].equals("time")) {
            time(settings, at, Long.parseLong(words[5]));
        } else {
            settings.put("acks", "all");
            produce(settings, at);
        }
    }

    static void tell(Map<String, Object> line) throws Exception {
        System.out.println(JSON.writeValueAsString(line));
    }

    static Map<String, Object> line(ConsumerRecord<String, String> record) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("offset", record.offset());
        line.put("key", record.key());
        line.put("value", record.value());
        return line;
    }

    static void group(Properties settings, String topic, String group, int count) throws Exception {
        settings.put("group.id", group);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("fetch.max.wait.ms", "200");
        StringDeserializer text = new StringDeserializer();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings, text, text)) {
            consumer.subscribe(List.of(topic));
            Map<TopicPartition, OffsetAndMetadata> read = new HashMap<>();
            while (count > 0) {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(500))) {
                    if (count-- <= 0) break;
                    Map<String, Object> line = line(record);
                    line.put("partition", record.partition());
                    tell(line);
                    read.put(new TopicPartition(topic, record.partition()),
                        new OffsetAndMetadata(record.offset() + 1));
                }
            }
            consumer.commitSync(read);
        }
    }

    static void time(Properties settings, TopicPartition at, long timestamp) throws Exception {
        StringDeserializer text = new StringDeserializer();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings, text, text)) {
            OffsetAndTimestamp found = consumer.offsetsForTimes(Map.of(at, timestamp)).get(at);
            tell(Map.of("offset", found == null ? -1 : found.offset()));
        }
    }

    static void consume(Properties settings, TopicPartition at, long offset, long end) throws Exception {
        StringDeserializer text = new StringDeserializer();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings, text, text)) {
            consumer.assign(List.of(at));
            consumer.seek(at, offset);
            while (true) {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(500))) {
                    tell(line(record));
                    if (record.offset() >= end - 1) return;
                }
            }
        }
    }

    static void load(Properties settings, String topic) throws Exception {
        StringSerializer text = new StringSerializer();
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings, text, text)) {
            BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                JsonNode given = JSON.readTree(line);
                String value = text(given.get("value"));
                // Its thread calls back for one record after the other.
                producer.send(new ProducerRecord<>(topic, text(given.get("key")), value), (placed, error) -> {
                    Map<String, Object> told = new LinkedHashMap<>();
                    told.put("value", value);
                    told.put("partition", placed.partition());
                    told.put("offset", placed.offset());
                    if (error != null) told.put("error", String.valueOf(error));
                    try {
                        tell(told);
                    } catch (Exception unwritten) {
                        throw new IllegalStateException(unwritten);
                    }
                });
            }
        }
    }

    static String text(JsonNode node) {
        return node == null || node.isNull() ? null : node.asText();
    }

    static void produce(Properties settings, TopicPartition at) throws Exception {
        StringSerializer text = new StringSerializer();
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings, text, text)) {
            BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                JsonNode given = JSON.readTree(line);
                try {
                    tell(Map.of("offset", producer.send(new ProducerRecord<>(
                        at.topic(), at.partition(), text(given.get("key")), text(given.get("value"))
                    )).get().offset()));
                } catch (ExecutionException error) {
                    tell(Map.of("error", String.valueOf(error.getCause())));
                }
            }
        }
    }
}
