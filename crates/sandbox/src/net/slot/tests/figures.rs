//! For `make bench`: what a slot costs, and a change of what it may reach.

use super::*;

const SLOTS: u16 = 200;

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn ms(work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    work();
    begun.elapsed().as_secs_f64() * 1000.0
}

#[test]
#[ignore = "a figure"]
fn figures_of_two_hundred_slots() {
    in_a_world(212, |world| {
        let _wall = world.wall();
        let mut settings = world.settings.clone();
        settings.limits = Limits { connections: 64, ..Limits::default() };
        let (mut kept, mut times) = (Vec::new(), Vec::new());
        for number in 0..SLOTS {
            let id = SandboxId::new(Number::new(number).expect("slot"));
            times.push(ms(|| {
                kept.push(Slot::prepare(&world.place, id, &settings, Device::Handed).expect("slot"));
            }));
        }
        let (first, last) = (median(&times[..20]), median(&times[times.len() - 20..]));
        let ratio = last / first;
        println!(
            "figure: making a slot, the last 20 of {SLOTS} against the first 20: {last:.1} ms, {first:.1} ms, ratio {ratio:.2}, goal <= 1.5"
        );
        let rules = (0..100).map(|n| rule(&format!("9.{n}.0.0/16"), None, &[443])).collect();
        let (wide, (slot, _)) = (allow(rules), &mut kept[0]);
        let changes: Vec<f64> = (0..50)
            .map(|round| {
                let policy = if round % 2 == 0 { wide.clone() } else { Policy::public() };
                ms(|| slot.apply(policy, &settings).expect("change"))
            })
            .collect();
        let change = median(&changes);
        println!("figure: a change of a policy of 100 rules in force: {change:.2} ms, goal <= 10");
        let target = Target::Domain("a.example.com".parse().expect("name"));
        let named = Rule { target, ..rule("9.1.1.1", None, &[443]) };
        let number = named.number();
        slot.apply(allow(vec![named]), &settings).expect("change");
        let opened = [Opened { rule: number, address: OTHER, ttl_seconds: 60 }];
        let openings: Vec<f64> =
            (0..50).map(|_| ms(|| slot.admit(&opened, &settings.floor).expect("opened"))).collect();
        let opening = median(&openings);
        println!("figure: an address opened that is open: {opening:.2} ms, goal <= 1");
        assert!(opening <= 1.0, "opening takes too long");
        assert!(ratio <= 1.5, "slots cost more the more there are");
        assert!(change <= 10.0, "a change takes too long");
    });
}
