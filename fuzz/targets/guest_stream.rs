//! The host's reading of one operation: any frames, in any order.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pepo_fuzz::guest_stream(bytes));

libfuzzer_sys::fuzz_mutator!(|input: &mut [u8], size: usize, most: usize, chance: u32| {
    pepo_fuzz::mutate(pepo_fuzz::GUEST_STREAM, input, size, most, chance)
});
