// Bookkeeping over lists of token ids. A list is not sorted: its ids are bits, and bits are in order.
#pragma once

#include "methods.h"

using BitSet = std::vector<uint64_t>;
using TokenLists = Array<const int64_t, 3>;  // [B, Hs, M]

// With a bit for each id of the lists, all 0.
inline BitSet words_for(const TokenLists& lists) {
    int64_t largest = 0, count = lists.sizes[0] * lists.sizes[1] * lists.sizes[2];
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, lists.data[i]);
    return BitSet(largest / 64 + 1);
}

struct Marked {
    int64_t named = 0, distinct = 0;
};

// Set the bits of a list's ids; how many ids >= 0 there are, and how many bits were not set.
inline Marked mark(BitSet& words, Array<const int64_t, 1> tokens) {
    Marked marked;
    for (int64_t token : tokens)
        if (token >= 0) {
            uint64_t bit = uint64_t(1) << token % 64;
            marked.named++;
            marked.distinct += !(words[token / 64] & bit);
            words[token / 64] |= bit;
        }
    return marked;
}

// See `kvbench.kernels.lists.count_lists`: named, distinct [B, Hkv].
inline int64_t count_lists(TokenLists lists, Array<int64_t, 2> named, Array<int64_t, 2> distinct) {
    BitSet words = words_for(lists);
    int64_t heads = lists.sizes[1], kv_heads = named.sizes[1], per_head = std::max<int64_t>(1, heads / kv_heads);
    for (int64_t row = 0; row < lists.size(); row++)
        for (int64_t head = 0; head < kv_heads; head++) {
            if (head >= heads) {
                named[row][head] = named[row][0], distinct[row][head] = distinct[row][0];
                continue;
            }
            Marked all;
            for (int64_t list = head * per_head; list < (head + 1) * per_head; list++) {
                Marked marked = mark(words, lists[row][list]);
                all.named += marked.named, all.distinct += marked.distinct;
            }
            for (int64_t list = head * per_head; list < (head + 1) * per_head; list++)
                for (int64_t token : lists[row][list]) words[std::max<int64_t>(token, 0) / 64] = 0;
            named[row][head] = all.named, distinct[row][head] = all.distinct;
        }
    return 0;
}

// What `kvbench.memory.stage.plan_stage` plans, of lists [B, Hs, M] and staged [L, V], L = B * Hkv; newest [B], of each
// row the id of the token that is on the device anyway, or -1. Written: ids [L, U] where there is something, and
// numbers: tokens that are neither staged nor the newest, whether there is one everywhere, and how many are staged.
// Returns ids of the longest list.
inline int64_t plan_lists(TokenLists lists, Array<const int64_t, 2> staged, Array<const int64_t, 1> newest,
                          Array<int64_t, 2> ids, Array<int64_t, 1> numbers) {
    BitSet words = words_for(lists);
    int64_t heads = ids.size() / lists.size(), per_head = std::max<int64_t>(1, lists.sizes[1] / heads), longest = 0;
    int64_t &moving = numbers[0], &complete = numbers[1], &hits = numbers[2];
    moving = hits = 0, complete = 1;
    for (int64_t at = 0; at < ids.size(); at++) {
        int64_t row = at / heads, head = std::min(at % heads * per_head, lists.sizes[1] - 1);
        for (int64_t list = head; list < std::min(head + per_head, lists.sizes[1]); list++)
            complete &= mark(words, lists[row][list]).named == lists.sizes[2];
        Array<const int64_t, 1> here = staged.size() ? staged[at] : Array<const int64_t, 1>{nullptr, {0}};
        int64_t used = 0, place = 0, *out = ids[at].data;
        for (size_t i = 0; i < words.size(); i++)
            for (uint64_t word = std::exchange(words[i], 0); word; word &= word - 1) {
                int64_t token = i * 64 + __builtin_ctzll(word);
                while (place < here.size() && here[place] < token) place++;
                if (place < here.size() && here[place] == token)
                    hits++;
                else
                    moving += token != newest[row];
                out[used++] = token;
            }
        longest = std::max(longest, used);
    }
    return longest;
}
