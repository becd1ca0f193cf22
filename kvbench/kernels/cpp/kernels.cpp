// What Python calls, by `kvbench.kernels.library`: numbers are int64 or double, and structures are passed by address.
#include "attend.h"
#include "blocks.h"
#include "codes.h"
#include "layers.h"
#include "lists.h"
#include "tokens.h"

extern "C" {

// The number of the format with this name, for keys or for values; -1: there is none.
int64_t kvbench_find_format(const char* name, int64_t of_values) {
    for (const Format& format : FORMATS)
        if (!std::strcmp(format.name, name) && (!of_values || format.add_values)) return &format - FORMATS;
    return -1;
}

int64_t kvbench_attend_resident(const Request* request, const ResidentRows* slots) {
    attend_resident(*request, *slots);
    return 0;
}
int64_t kvbench_attend_lists(const Request* request, const Lists* lists) { return attend_lists(*request, *lists); }
int64_t kvbench_attend_blocks(const Request* request, const BlockLists* lists) {
    attend_blocks(*request, *lists);
    return 0;
}
void kvbench_join(const Request* request) { join(*request, request->results, request->pieces); }
void kvbench_gather(int64_t threads, const Blocks* from, const int64_t* ids, int64_t count, char* keys, char* values) {
    gather(threads, *from, ids, count, keys, values);
}

int64_t kvbench_finite(const char* query, int64_t queries, const char* key, int64_t keys, int64_t is_bfloat16) {
    return is_finite(query, queries, is_bfloat16) && is_finite(key, keys, is_bfloat16);
}
void kvbench_put(const Slots* to, const char* key, const char* value, int64_t* used, const int64_t* tokens) {
    put(*to, key, value, used, tokens);
}
void kvbench_put_in_place(const char* rows, char* pool, int64_t size, const int64_t* slot_of, bool* present,
                          const int64_t* tokens, int64_t heads, int64_t per_row, int64_t slots) {
    put_in_place(rows, pool, size, slot_of, present, tokens, heads, per_row, slots);
}
void kvbench_encode(const Encode* of) { encode(*of); }
void kvbench_turn(const RotaryTurn* of) { turn(*of); }
void kvbench_products(const Products* of) { products(*of); }

void kvbench_linear(int64_t threads, const char* x, const char* weight, const char* bias, char* out, int64_t rows,
                    int64_t inputs, int64_t outputs) {
    Linear layer{weight, out, outputs, bias};
    linear(threads, laid_out(x, rows, inputs).data(), rows, inputs, &layer, 1);
}
void kvbench_gated(int64_t threads, const char* x, const char* gate, const char* up, const char* down, char* out,
                   int64_t rows, int64_t inputs, int64_t hidden) {
    gated(threads, x, gate, up, down, out, rows, inputs, hidden);
}
void kvbench_rotated(const RotatedLayers* of) { rotated(*of); }
void kvbench_normed(const char* x, const char* weight, char* out, int64_t rows, int64_t width, double epsilon) {
    normed(x, weight, out, rows, width, epsilon);
}
}

KERNEL(count_lists)
KERNEL(plan_lists)
