// The best of what a search has listed: pages for each query, joined over a group, or rows.
//
// Pages are found in two passes. The first reads every listed key's sketch, a quarter of its size, which says what q.k
// can be at most. The second reads the few keys that this leaves, and ranks by them alone, as if all had been read.
#pragma once

#include "tree.h"

// scores[i] = the best member's query . key, of page runs[i], start <= i < stop.
//
// Only those members' keys are read that can be the best: whose bound reaches what another has at least. bounds
// [points], what each listed member's score is at most, and at least so many steps less: `doubt`.
inline void score_exactly(const Tree& tree, const float* query, const float* bounds, float doubt, const int32_t* runs,
                          int64_t start, int64_t stop, float* scores, const Workspace& work) {
    std::vector<int64_t> ends;
    int64_t count = 0, at = 0;
    for (int64_t i = start; i < stop; i++) {
        int64_t first = work.starts[runs[i]], last = work.starts[runs[i] + 1];
        float least = -INFINITY;
        for (int64_t member = first; member < last; member++)
            least = std::max(least, bounds[member] - doubt * work.step[member]);
        for (int64_t member = first; member < last; member++) {
            work.members[count] = work.rows[member];
            count += bounds[member] >= least;
        }
        ends.push_back(count);
    }
    products(tree, work.members, count, query, work.exact);
    for (int64_t i = start; i < stop; i++)
        for (scores[i] = -INFINITY; at < ends[i - start]; at++) scores[i] = std::max(scores[i], work.exact[0][at]);
}

// Fill pages, scores [G, P] with the pages of the best members among those listed, best first, then -1 and -inf.
//
// The P pages of the largest bounds are scored by their keys; the worst of them is what any other has to reach.
inline void best_pages(const Tree& tree, int64_t runs, const Matrix<float>& queries, const Matrix<int32_t>& pages,
                       const Matrix<float>& scores, const Workspace& work) {
    int64_t most = pages.width, count = work.starts[runs];
    SketchedQueries asked(queries, tree.sketch.width);
    sketched_products(tree, count, asked, work);
    std::vector<int32_t> chosen(runs);
    std::vector<float> exact(runs);
    for (int64_t g = 0; g < queries.rows; g++) {
        float *bounds = work.score[g], half = asked.half[g], unit = asked.unit[g];
        for (int64_t i = 0; i < count; i++) bounds[i] = work.step[i] * (unit * bounds[i] + half);
        for (int64_t run = 0; run < runs; run++) {
            const float *first = bounds + work.starts[run], *last = bounds + work.starts[run + 1];
            float largest = *first;
            for (; first < last; first++) largest = std::max(largest, *first);
            work.scratch[run] = largest;
        }
        int64_t start = 0, stop = best(work.scratch.data, runs, most, chosen.data());
        float least = INFINITY;
        while (start < stop) {
            score_exactly(tree, queries[g], bounds, 2 * half, chosen.data(), start, stop, exact.data(), work);
            for (int64_t i = start; i < stop; i++) {
                least = std::min(least, exact[i]);
                work.scratch[chosen[i]] = -INFINITY;
            }
            bool is_full = (start = stop) == most;
            for (int64_t run = 0; is_full && run < runs; run++)
                if (work.scratch[run] >= least && work.scratch[run] > -INFINITY) chosen[stop++] = run;
        }
        write_best(exact.data(), stop, most, pages[g], scores[g]);
        for (int32_t* page = pages[g]; page < pages[g] + most; page++)
            if (*page != ABSENT) *page = work.pages[chosen[*page]];
    }
}

// Fill rows, scores [G, k] with the best keys among those listed, best first, then -1 and -inf.
inline void best_rows(const Tree& tree, int64_t runs, const Matrix<float>& queries, const Matrix<int32_t>& rows,
                      const Matrix<float>& scores, const Workspace& work) {
    int64_t count = work.starts[runs];
    products(tree, work.rows, 0, count, queries, work.score);
    for (int64_t g = 0; g < queries.rows; g++) {
        write_best(work.score[g], count, rows.width, rows[g], scores[g]);
        for (int32_t* row = rows[g]; row < rows[g] + rows.width; row++)
            if (*row != ABSENT) *row = work.rows[*row];
    }
}

// Join the ranked lists [G, P] of a query group, -1 = none: rank 0 of each query, rank 1, ..., without repeats, up to
// the first `most` (truncated union: the group's budget is that of one KV head).
inline std::vector<int32_t> interleaved(const Matrix<int32_t>& lists, size_t most) {
    int32_t highest = ABSENT;
    for (int64_t i = 0; i < lists.rows * lists.width; i++) highest = std::max(highest, lists.data[i]);
    std::vector<bool> taken(highest + 1);
    std::vector<int32_t> joined;
    for (int64_t rank = 0; rank < lists.width; rank++)
        for (int64_t query = 0; query < lists.rows; query++) {
            int32_t entry = lists[query][rank];
            if (joined.size() == most || entry == ABSENT || taken[entry]) continue;
            taken[entry] = true;
            joined.push_back(entry);
        }
    return joined;
}
